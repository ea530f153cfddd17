"""Faults of other projects' continuous batching, which must not happen here; each test names where it was reported."""

import threading

import pytest

from decodekit.core.errors import InputError
from tests.cases.test_cache_and_serving import tokens
from tests.runtime.test_engine import engine_of, used

pytestmark = pytest.mark.integration

REPEATING = {"drafter": {"kind": "ngram", "schedule": "constant"}}


def solo(prompt, **options):
    return engine_of().submit(prompt, **options).result().token_ids


def test_a_request_larger_than_the_pool_is_refused_and_blocks_nobody() -> None:
    """https://github.com/vllm-project/vllm/issues/39734: it was tried again for ever, and the others with it."""
    engine, taken = engine_of(blocks=12), {}
    for length in (5, 120, 9, 12):
        prompt = tokens(length, length)
        if length == 120:
            with pytest.raises(InputError, match=r"never fits: its prompt of 120 and up to 4 new .* blocks"):
                engine.submit(prompt, max_new_tokens=4)
        else:
            taken[engine.submit(prompt, max_new_tokens=4).id] = prompt
    engine.step()
    late = tokens(7, 7)
    taken[engine.submit(late, max_new_tokens=4).id] = late
    found = dict(engine.results())
    assert {name: output.token_ids for name, output in found.items()} == {
        name: solo(prompt, max_new_tokens=4) for name, prompt in taken.items()
    }
    assert used(engine) == 0


@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_preemption_does_not_cascade(preemption) -> None:
    """https://github.com/vllm-project/vllm/issues/49674: victims whose blocks were not free yet made more victims."""
    engine = engine_of(blocks=16, slots=12, promise=0.0, preemption=preemption)
    prompts = [tokens(4 + number % 3, number) for number in range(12)]
    requests = [engine.submit(prompt, max_new_tokens=16) for prompt in prompts]
    steps = 0
    while not all(request.done for request in requests):
        before = engine.tokens
        engine.step()
        steps += engine.tokens == before
    outputs = [request.result() for request in requests]
    assert [output.token_ids for output in outputs] == [solo(prompt, max_new_tokens=16) for prompt in prompts]
    assert sum(output.stats["preemptions"] for output in outputs) > 0
    assert max(output.stats["preemptions"] for output in outputs) <= 4
    assert steps <= 12, "a step makes progress, or waits once"
    assert used(engine) == 0


@pytest.mark.parametrize("recipe", [{}, REPEATING], ids=["plain", "drafts"])
def test_an_aborted_request_keeps_no_block_whatever_its_phase(recipe) -> None:
    """https://github.com/vllm-project/vllm/issues/46283: queued, half prefilled, decoding, speculating, over, twice."""
    for steps in range(8):  # the prompt takes three steps, the rest is decoding
        engine = engine_of(recipe=recipe, tokens_per_step=4)
        request = engine.submit(tokens(4) * 3, max_new_tokens=12)
        for _ in range(steps):
            engine.step()
        for _ in range(2):
            request.cancel()
        engine.cancel("nobody")
        assert used(engine) == 0
        assert [output.finish_reason for _, output in engine.results()] == ["cancelled"]
    engine = engine_of(recipe=recipe)
    request = engine.submit(tokens(5), max_new_tokens=3)
    over = request.result()
    request.cancel()
    assert request.result() is over
    assert used(engine) == 0


def test_a_result_is_found_by_its_request_and_a_cancelled_one_is_an_event() -> None:
    """https://github.com/huggingface/transformers/issues/42943: others were given back, and who had been cancelled waited."""
    engine = engine_of()
    requests = [engine.submit(tokens(4, number), id=f"r{number}", max_new_tokens=4 + number) for number in range(6)]
    assert requests[-1].result().token_ids == solo(tokens(4, 5), max_new_tokens=9)
    assert [name for name, _ in engine.results()] == [f"r{number}" for number in range(5)]
    running, events = engine.submit(tokens(6, 9), max_new_tokens=200), []
    reader = threading.Thread(target=lambda: events.append(running.result()))
    engine.step()
    reader.start()
    running.cancel()
    reader.join(timeout=60)
    assert not reader.is_alive()
    assert [output.finish_reason for output in events] == ["cancelled"]
    assert running.result() is events[0]


def test_audits_of_requests_that_share_steps_are_their_own() -> None:
    """Not a report: every request has the certificate of its own steps, also after it was put aside."""
    engine = engine_of(blocks=14, slots=6, promise=0.0, recipe={"audit": 1})
    prompts = [tokens(4, number) for number in range(5)]
    requests = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
    outputs = [request.result() for request in requests]
    assert sum(output.stats["preemptions"] for output in outputs) > 0
    for output in outputs:
        certificate = output.stats["audit"]
        assert certificate["steps"] >= len(output.token_ids)
        assert certificate["worst_difference"] < 1e-9
        assert certificate["flips"] == []
