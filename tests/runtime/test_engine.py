import random
import statistics
import threading
import time
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch

import decodekit
from decodekit.core.errors import InputError, Refused
from decodekit.core.protocols import Rule
from decodekit.recipe import Generation, Recipe
from decodekit.runtime.batch import Batch
from decodekit.runtime.forward import RaggedForward
from decodekit.testing import tiny_model
from tests.runtime.schedules import BLOCK, FailsAt, budget_of, live_once, target, tokenizer

FAMILIES = ["dense", "sliding", "hybrid"]
PAGED = {"cache": {"kind": "paged", "block_size": BLOCK}}


def engine_of(family="dense", *, blocks=60, slots=8, recipe=None, **options):
    recipe = {**PAGED, **(recipe or {})}
    options = {"slots": slots, **options}
    return decodekit.Engine(target(family), tokenizer(), recipe, budget_of(family, blocks, slots), **options)


def used(engine):
    return sum(group["used"] for group in engine.stats()["caches"]["main"]["groups"])


@pytest.fixture
def forwards(monkeypatch):
    """Rows and tokens of each forward."""
    seen = []
    original = RaggedForward.__call__

    def noted(self, rows, tokens, **options):
        seen.append([len(ids) for ids in tokens])
        return original(self, rows, tokens, **options)

    monkeypatch.setattr(RaggedForward, "__call__", noted)
    return seen


@pytest.mark.parametrize("start", range(0, 940, 47))
def test_every_request_has_the_tokens_of_its_solo_run(start) -> None:
    for seed in range(start, start + 47):
        live_once(seed, FAMILIES[seed % 8 % 3])


@pytest.mark.parametrize("start", [0, 24])
def test_every_request_has_the_tokens_of_its_solo_run_where_rows_are_packed(start, monkeypatch) -> None:
    monkeypatch.setattr("decodekit.runtime.places.triton_runs", lambda device: True)
    for seed in range(start, start + 24):
        live_once(seed, FAMILIES[seed % 2])


def test_steps_and_prompts_share_a_forward_where_rows_are_packed(monkeypatch) -> None:
    monkeypatch.setattr("decodekit.runtime.places.triton_runs", lambda device: True)
    seen = []
    original = RaggedForward.packed

    def noted(self, rows, tokens, kept):
        seen.append(([len(ids) for ids in tokens], len(kept)))
        return original(self, rows, tokens, kept)

    monkeypatch.setattr(RaggedForward, "packed", noted)
    prompts = [list(range(3, 9)), *(list(range(4, 4 + length)) for length in (9, 25))]
    lengths = (8, 4, 4)
    with engine_of(tokens_per_step=20) as engine:
        requests = [engine.submit(ids, max_new_tokens=count) for ids, count in zip(prompts, lengths, strict=True)]
        outputs = [request.result().token_ids for request in requests]
    assert any(counts[0] == 1 and max(counts) > 1 for counts, _ in seen)
    # Budget for the last prompt is left for a part of it, which gives nothing; those that step or are through give one each.
    assert ([1, 1, 18], 2) in seen or any(kept == len(counts) - 1 for counts, kept in seen)
    with engine_of() as engine:
        alone = [
            engine.submit(ids, max_new_tokens=count).result().token_ids
            for ids, count in zip(prompts, lengths, strict=True)
        ]
    assert outputs == alone


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 11_000, 250))
def test_every_request_has_the_tokens_of_its_solo_run_over_ten_thousand_schedules(start) -> None:
    aside = sum(live_once(seed, FAMILIES[seed % 3])[1] for seed in range(start, start + 250))
    assert aside > 10


def test_requests_that_agree_are_scored_together_and_all_rows_are_forwarded_together(forwards) -> None:
    engine = engine_of()
    for number in range(3):
        engine.submit([5, 6, 7 + number], recipe={"generation": {"do_sample": True, "seed": number}}, max_new_tokens=4)
        engine.submit([8, 9, 7 + number], max_new_tokens=4, recipe={"rules": [{"kind": "min_length", "n": 2}]})
    assert len(engine._batch.loop.lanes) == 2
    dict(engine.results())
    assert forwards[-1] == [1] * 6


def test_stream_gives_the_text_piece_by_piece_and_others_go_on() -> None:
    engine = engine_of()
    first, second = (engine.submit([5, 17, number], max_new_tokens=9) for number in (1, 2))
    pieces = list(first.stream())
    assert len(pieces) > 3
    assert "".join(pieces) == first.result().text
    assert second.done


def test_cancel_frees_blocks_at_once_and_always_ends_in_an_event() -> None:
    for steps in range(5):
        engine = engine_of(tokens_per_step=4)
        kept, gone = engine.submit([5, 17, 42], max_new_tokens=6), engine.submit([9] * 9, id="gone", max_new_tokens=12)
        for _ in range(steps):
            engine.step()
        before = used(engine)
        gone.cancel()
        gone.cancel()
        engine.cancel("nobody")
        assert gone.done
        assert gone.result().finish_reason == "cancelled"
        assert list(gone.stream()) == ([gone.result().text] if gone.result().text else [])
        assert used(engine) < before or steps == 0
        alone = engine_of().submit([5, 17, 42], max_new_tokens=6)
        assert kept.result().token_ids == alone.result().token_ids
        assert used(engine) == 0


def test_what_cannot_run_is_refused_when_it_is_submitted() -> None:
    engine = engine_of(blocks=8, slots=2)
    engine.submit([5], id="a", max_new_tokens=2)
    with pytest.raises(InputError, match="id 'a' was submitted before"):
        engine.submit([5], id="a")
    with pytest.raises(InputError, match="never fits: its prompt of 20 and up to 20 new"):
        engine.submit([5] * 20, max_new_tokens=20)
    with pytest.raises(InputError, match="3 rows at once; the engine has 2 slots"):
        engine.submit([5], recipe={"strategy": {"kind": "beam", "num_beams": 3}}, max_new_tokens=2)
    with pytest.raises(InputError, match="the prompt is empty"):
        engine.submit("  ")
    with pytest.raises(InputError, match="the prompt holds the id 500"):
        engine.submit([5, 500])
    with pytest.raises(InputError, match="expected a model that generates, got 'gpt2'"):
        decodekit.Engine("gpt2", tokenizer(), {})
    with pytest.raises(InputError, match="unknown option 'max_tokens'"):
        engine.submit([5], max_tokens=2)
    with pytest.raises(Refused, match="all requests share the engine's"):
        engine.submit([5], recipe={"cache": "dynamic"})
    with pytest.raises(Refused, match="keeps K/V in blocks"):
        decodekit.Engine(target("dense"), tokenizer(), {"cache": "dynamic"})
    with pytest.raises(InputError, match="holds no block"):
        decodekit.Engine(target("dense"), tokenizer(), {}, budget=10)
    assert [name for name, _ in engine.results()] == ["a"]


@pytest.mark.parametrize("recipe", [None, {"drafter": {"kind": "ngram"}}, {"rules": [{"kind": "top_k", "k": 3}]}])
def test_what_never_fits_is_refused_in_10_ms(recipe) -> None:
    engine, seconds = engine_of(blocks=8, slots=2), []
    for _ in range(20):
        started = time.process_time()
        with pytest.raises(InputError, match="never fits"):
            engine.submit([5] * 20, recipe=recipe, max_new_tokens=20)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.01


@pytest.mark.parametrize("error", ["ValueError", "RowError"])
def test_a_failing_request_leaves_the_others_as_they_are(error) -> None:
    failing = Recipe(rules=(FailsAt(error=error),), generation=Generation(max_new_tokens=6))
    engine = engine_of()
    good = [engine.submit([5, 17, number], max_new_tokens=6) for number in range(3)]
    bad = [engine.submit([8, number], recipe=failing) for number in range(2)]
    assert all("on purpose" in own.result().error and len(own.result().token_ids) == 2 for own in bad)
    alone = [engine_of().submit([5, 17, number], max_new_tokens=6).result().token_ids for number in range(3)]
    assert [own.result().token_ids for own in good] == alone
    assert used(engine) == 0


def test_a_lane_that_fails_for_one_of_its_requests_goes_on_for_the_others() -> None:
    class Picky(FailsAt):
        def __call__(self, rows, logits):
            if bool((rows.tokens[:, 0] == 66).any()):
                raise ValueError("no 66")
            return logits

    picky = Recipe(rules=(Picky(),), generation=Generation(max_new_tokens=5))
    engine = engine_of()
    good, bad = engine.submit([5, 17], recipe=picky), engine.submit([66, 17], recipe=picky)
    assert "no 66" in bad.result().error
    assert good.result().token_ids == engine_of().submit([5, 17], max_new_tokens=5).result().token_ids


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_step_starts_requests_again_and_a_failed_one_ends_them(kind, monkeypatch) -> None:
    expected = [engine_of().submit([5, 17, n], max_new_tokens=8).result().token_ids for n in range(3)]
    for place in range(1, 6):
        engine, calls = engine_of(), []
        requests = [engine.submit([5, 17, n], max_new_tokens=8) for n in range(3)]
        original = Batch._collect if place % 2 else RaggedForward.__call__

        def interrupted(*args, _original=original, _calls=calls, _place=place, **options):
            _calls.append(1)
            if len(_calls) == _place:
                raise kind("on purpose")
            return _original(*args, **options)

        with monkeypatch.context() as patch:
            owner, name = (Batch, "_collect") if place % 2 else (RaggedForward, "__call__")
            patch.setattr(owner, name, interrupted)
            if kind is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    dict(engine.results())
                assert [own.result().token_ids for own in requests] == expected
            else:
                assert all("on purpose" in output.error for _, output in engine.results())
        assert engine.submit([5, 17, 0], max_new_tokens=8).result().token_ids == expected[0]
        assert used(engine) == 0


def test_threads_submit_wait_and_cancel_at_will() -> None:
    engine, outcomes, failures = engine_of(slots=4), {}, []

    def work(number):
        try:
            for turn in range(4):
                request = engine.submit([5, number, turn], id=f"{number}-{turn}", max_new_tokens=5)
                if (number + turn) % 3 == 0:
                    request.cancel()
                outcomes[request.id] = "".join(request.stream()), request.result()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(outcomes) == 20
    assert all(text == output.text for text, output in outcomes.values())
    assert used(engine) == 0


def test_time_limits_end_requests_that_run_and_that_wait() -> None:
    engine = engine_of(slots=1)
    running = engine.submit([5, 6], max_new_tokens=40, max_time=1e-9)
    waiting = engine.submit([5, 7], max_new_tokens=40, max_time=1e-9)
    other = engine.submit([5, 8], max_new_tokens=3)
    assert [own.result().finish_reason for own in (running, waiting, other)] == ["time", "time", "length"]


@pytest.mark.parametrize("preemption", ["recompute", "offload"])
@pytest.mark.parametrize("family", FAMILIES)
def test_when_blocks_run_out_the_last_in_line_is_put_aside_and_nothing_starves(family, preemption) -> None:
    engine = engine_of(family, blocks=9, slots=6, promise=0.0, preemption=preemption, patience=10)
    requests = [engine.submit([5, 6, 7, number], max_new_tokens=20) for number in range(6)]
    outputs = [request.result() for request in requests]
    assert sum(output.stats["preemptions"] for output in outputs) > 0
    assert outputs[0].stats["preemptions"] == 0
    roomy = engine_of(family, blocks=100)
    assert [output.token_ids for output in outputs] == [
        roomy.submit([5, 6, 7, number], max_new_tokens=20).result().token_ids for number in range(6)
    ]
    assert used(engine) == 0


def test_a_promise_of_all_tokens_puts_nobody_aside() -> None:
    engine = engine_of(blocks=12, slots=6, promise=1.0)
    for number in range(6):
        engine.submit([5, 6, 7, number], max_new_tokens=20)
    assert all(output.stats["preemptions"] == 0 for _, output in engine.results())


def test_the_shortest_goes_first_and_the_long_one_is_not_starved() -> None:
    engine = engine_of(slots=1, policy="shortest_remaining", patience=30)
    long = engine.submit([5, 6], id="long", max_new_tokens=40)
    ended = []
    for number in range(30):
        engine.submit([7, number], id=f"{number}", max_new_tokens=4)
        for _ in range(4):
            engine.step()
            ended += [name for name in engine._open if engine._open[name].done and name not in ended]
    assert ended[0] == "0"
    assert "long" in ended
    assert long.result().token_ids == engine_of().submit([5, 6], max_new_tokens=40).result().token_ids


def test_the_earliest_deadline_goes_first() -> None:
    engine = engine_of(slots=1, policy="deadline")
    for name, seconds in (("late", 3000), ("soon", 1000), ("later", 5000)):
        engine.submit([5, 6], id=name, max_new_tokens=3, max_time=seconds)
    assert [name for name, _ in engine.results()] == ["soon", "late", "later"]


def test_a_prefix_in_the_cache_is_not_computed_again() -> None:
    engine, prefix = engine_of(), list(range(7, 27))
    first = engine.submit([*prefix, 3], max_new_tokens=2).result()
    second = engine.submit([*prefix, 4], max_new_tokens=2).result()
    assert first.stats["forwarded_tokens"] == 22
    assert second.stats["forwarded_tokens"] == 2
    assert second.token_ids == engine_of(prefix_cache=False).submit([*prefix, 4], max_new_tokens=2).result().token_ids


def test_forty_mixed_requests_take_fewer_steps_and_wait_less_than_in_static_batches() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(2, 30) for _ in range(40)]
    recipes = [
        {},
        {"generation": {"do_sample": True, "seed": 1}},
        {"rules": [{"kind": "min_p", "p": 0.1}]},
        {"strategy": "dola"},
    ]
    engine, ends = engine_of(blocks=200, slots=8), {}
    requests = [
        engine.submit([5, number], recipe=recipes[number % 4], max_new_tokens=length, eos_token_id=0)
        for number, length in enumerate(lengths)
    ]
    while engine.step():
        ends |= {own.id: engine.stats()["steps"] for own in requests if own.done and own.id not in ends}
    real = [len(own.result().token_ids) for own in requests]
    static, latency = 0, []
    for start in range(0, 40, 8):
        static += max(real[start : start + 8])
        latency += [static] * 8
    assert engine.stats()["steps"] < static
    assert statistics.mean(ends.values()) < statistics.mean(latency)


@pytest.mark.parametrize("family", ["dense", "sliding"])
def test_a_long_prompt_never_delays_those_that_decode_by_more_than_a_chunk(family, forwards) -> None:
    model = tiny_model(family, layers=2)
    model.config.max_position_embeddings = 8192
    engine = decodekit.Engine(model, tokenizer(), PAGED, "64MiB", slots=8, tokens_per_step=256)
    rows = [engine.submit([5, number], max_new_tokens=30, eos_token_id=0) for number in range(3)]
    for _ in range(3):
        engine.step()
    forwards.clear()
    long = engine.submit([7, 8, 9, 10] * 1024, max_new_tokens=2)
    for _ in range(17):
        before = [len(own._job.tasks[0].root.tokens) for own in rows]
        engine.step()
        assert [len(own._job.tasks[0].root.tokens) for own in rows] == [count + 1 for count in before]
    prompts = [sum(counts) for counts in forwards if len(counts) == 1 and counts[0] > 1]
    assert max(prompts) <= 256
    assert sum(prompts) == 4096
    assert long.result().finish_reason in ("length", "eos")


def test_sixty_four_sequences_fit_in_blocks_where_sixteen_fit_by_reservation() -> None:
    rng, tokens = random.Random(1), 32_768
    sizes = [rng.randint(50, 500) for _ in range(64)]
    model = tiny_model("dense", layers=1)
    per_token = 2 * 2 * 8 * 4  # keys and values, heads, width, bytes
    options = {"slots": 64, "tokens_per_step": tokens}
    recipe = {"cache": {"kind": "paged", "block_size": 16}}
    engine = decodekit.Engine(model, tokenizer(), recipe, tokens * per_token, **options, promise=0.0)
    assert engine.stats()["num_blocks"] == 2048
    assert tokens // 2048 == 16
    for number, size in enumerate(sizes):
        engine.submit([5 + number % 90] * (size - 2), max_new_tokens=2, min_new_tokens=2)
    engine.step()
    assert engine.stats()["running"] == 64
    promised = decodekit.Engine(model, tokenizer(), recipe, tokens * per_token, **options, promise=1.0)
    for number, size in enumerate(sizes):
        promised.submit([5 + number % 90] * size, max_new_tokens=2048 - size)
    promised.step()
    assert promised.stats()["running"] == 16


def test_stats_of_a_request() -> None:
    engine = engine_of(slots=1)
    engine.submit([9, 9], max_new_tokens=3)
    output = engine.submit([5] * 6, max_new_tokens=6, eos_token_id=0).result()
    stats = output.stats
    assert 0 < stats["queue_s"] < stats["ttft_s"]
    assert 0 < stats["itl_p50_s"] <= stats["itl_p95_s"]
    assert stats["kv_blocks"] == 3
    assert stats["prompt_tokens"] == 6
    assert stats["target_forwards"] == 6


def test_text_in_and_out_with_a_constraint_of_one_request() -> None:
    engine = decodekit.Engine(tiny_model("dense"), tokenizer(), {"generation": {"max_new_tokens": 12}})
    free = engine.submit("the cat")
    bound = engine.submit({"prompt": "the cat", "constraint": {"kind": "choice", "choices": ["yes", "no"]}})
    assert bound.result().text in ("yes", "no")
    [alone] = decodekit.load({"generation": {"max_new_tokens": 12}}).run(engine._intake.model, tokenizer(), "the cat")
    assert (free.result().text, free.result().finish_reason) == (alone.text, alone.finish_reason)


def test_branches_on_another_model_share_the_engine() -> None:
    amateur = tiny_model("dense", dtype=torch.float64, seed=1)
    recipe = {"strategy": {"kind": "contrastive_decoding", "amateur": "small"}}
    engine = engine_of(recipe=recipe, models={"small": amateur})
    mixed = [engine.submit([5, 6, number], max_new_tokens=6) for number in range(3, 6)]
    plain = engine.submit([5, 6, 7], recipe={}, max_new_tokens=6)
    for number, request in enumerate(mixed, start=3):
        decoder = decodekit.load(recipe).bind(models={"small": amateur})
        ids = target("dense").generate(torch.tensor([[5, 6, number]]), max_new_tokens=6, custom_generate=decoder)
        assert request.result().token_ids == ids[0, 3:].tolist()
    assert plain.result().finish_reason in ("length", "eos")


def test_what_is_over_and_taken_is_kept_no_longer() -> None:
    engine = engine_of()
    taken, streamed, left = (engine.submit([5, 6, number], max_new_tokens=2) for number in range(3))
    assert taken.result().token_ids
    assert "".join(streamed.stream()) == streamed.result().text
    while not left.done:
        engine.step()
    assert list(engine._batch.ended) == list(engine._open) == [left.id]
    assert [name for name, _ in engine.results()] == [left.id]
    assert not engine._batch.ended


def test_numbers_that_were_given_as_ids_are_left_out_of_those_that_are_made_up() -> None:
    engine = engine_of()
    ids = [engine.submit([5], id=given, max_new_tokens=1).id for given in (1, "3", None, None, None)]
    assert ids[:2] == ["1", "3"]
    assert len({*ids}) == 5
    with pytest.raises(InputError, match="was submitted before"):
        engine.submit([5], id=ids[-1])
    assert len(dict(engine.results())) == 5


class Calls(Rule):
    """Calls the engine from within a step."""

    kind: Literal["calls"] = "calls"
    what: Any

    def __call__(self, rows, logits):
        self.what()
        return logits


@pytest.mark.parametrize("threads", [0, 4])
def test_a_call_from_within_a_step_is_an_error_and_a_cancel_waits_for_its_end(threads) -> None:
    engine, done = engine_of(), []
    other = engine.submit([9, 9], max_new_tokens=30)
    waiting = [threading.Thread(target=lambda: done.append(engine.stats())) for _ in range(threads)]

    def cancel():
        if waiting and waiting[0].ident is None:
            for thread in waiting:
                thread.start()
            while not engine._gate.locked():  # somebody stands at the door
                time.sleep(0.001)
        other.cancel()

    calling = Recipe(rules=(Calls(what=cancel),), generation=Generation())
    good = engine.submit([5, 17], recipe=calling, max_new_tokens=3)
    stepping = threading.Thread(target=engine.step, daemon=True)
    stepping.start()
    stepping.join(20)
    assert not stepping.is_alive()
    assert other.done
    assert other.result().finish_reason == "cancelled"
    assert good.result().token_ids == engine_of().submit([5, 17], max_new_tokens=3).result().token_ids
    for thread in waiting:
        thread.join()
    bad = engine.submit([5, 17], recipe=Recipe(rules=(Calls(what=engine.stats),)), max_new_tokens=3)
    assert "called from within one of its own steps" in bad.result().error


def test_an_interrupt_as_a_turn_begins_gives_it_back(monkeypatch) -> None:
    engine = engine_of()

    @contextmanager
    def interrupted():
        yield
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_gate", interrupted())
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    found = []
    other = threading.Thread(target=lambda: found.append(engine.step()), daemon=True)
    other.start()
    other.join(30)
    assert found == [False]
