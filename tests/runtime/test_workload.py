import json
import random

import pytest

import decodekit
from decodekit.cache.ledger import ledger
from decodekit.core.errors import InputError
from decodekit.runtime.workload import Arrival, continuous, machine_of, read_trace, split_of, static
from decodekit.testing import tiny_model
from tests.runtime.schedules import tokenizer


def machine(family="dense", **figures):
    config = tiny_model(family).config
    figures = {"flops": 1e12, "bandwidth": 1e11, **figures}
    return machine_of(config, ledger(config, 100, 1, dtype="float32"), **figures)


def test_a_step_takes_what_its_operations_or_its_bytes_take() -> None:
    own = machine()
    model = tiny_model("dense")
    counted = sum(part.numel() for part in model.parameters()) - model.get_input_embeddings().weight.numel()
    assert own.parameters == counted
    seconds, work = own.seconds([(10, 1), (0, 4)])
    assert work == 2 * counted * 5 + 4 * 4 * 4 * 8 * (11 + 10)
    moved = 4 * counted + (12 + 8) * 2 * 2 * 8 * 4 * 4
    assert seconds == pytest.approx(max(work / 1e12, moved / 1e11))
    assert machine("hybrid").state_bytes > 0


@pytest.mark.parametrize("tokens", [8, 2048])
@pytest.mark.parametrize("blocks", [24, 500])
def test_the_engine_takes_the_steps_that_the_replay_says(tokens, blocks) -> None:
    rng = random.Random(tokens)
    trace = [Arrival(0.0, rng.randint(1, 30), rng.randint(2, 20)) for _ in range(24)]
    replay = continuous(trace, machine(), slots=6, tokens=tokens, blocks=blocks, block_size=4, promise=1.0)
    model = tiny_model("dense")
    budget = blocks * 4 * ledger(model.config, 4, 1, dtype="float32").kv_bytes_per_token
    recipe = {"cache": {"kind": "paged", "block_size": 4}}
    engine = decodekit.Engine(
        model, tokenizer(), recipe, budget, slots=6, tokens_per_step=tokens, promise=1.0, prefix_cache=False
    )
    for number, arrival in enumerate(trace):
        ids = [5 + number, *[7] * (arrival.prompt - 1)]
        engine.submit(ids, max_new_tokens=arrival.output, min_new_tokens=arrival.output)
    list(engine.results())
    assert engine.stats()["steps"] == pytest.approx(replay.steps, rel=0.05)
    assert engine.stats()["tokens"] == replay.tokens


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "blocks"), [(64, 60), (2048, 400)])
def test_the_engine_takes_the_steps_that_the_replay_says_on_the_demo_model(demo, tokens, blocks) -> None:
    model, words = demo
    rng = random.Random(tokens)
    trace = [Arrival(0.0, rng.randint(8, 120), rng.randint(4, 24)) for _ in range(16)]
    replay = continuous(trace, machine(), slots=8, tokens=tokens, blocks=blocks, block_size=16, promise=1.0)
    budget = blocks * 16 * ledger(model.config, 16, 1, dtype="float32").kv_bytes_per_token
    options = {"slots": 8, "tokens_per_step": tokens, "promise": 1.0, "prefix_cache": False}
    with decodekit.Engine(model, words, {"cache": {"kind": "paged", "block_size": 16}}, budget, **options) as engine:
        for arrival in trace:
            ids = [rng.randrange(100, 40_000) for _ in range(arrival.prompt)]
            engine.submit(ids, max_new_tokens=arrival.output, min_new_tokens=arrival.output)
        list(engine.results())
        stats = engine.stats()
    print(f"{stats['steps']} steps, the replay {replay.steps}; {stats['tokens']} tokens")
    assert stats["steps"] == pytest.approx(replay.steps, rel=0.05)
    assert stats["tokens"] == replay.tokens


def test_continuous_batching_beats_static_and_chunks_shorten_gaps() -> None:
    rng = random.Random(0)
    trace = sorted(Arrival(number / 500, rng.randint(10, 400), rng.randint(5, 200)) for number in range(80))
    own = machine(flops=1e9, bandwidth=1e11)  # so slow that a long prompt holds up a step
    batches = static(trace, own, slots=8)
    whole = continuous(trace, own, slots=8, tokens=None, blocks=None, block_size=16)
    chunked = continuous(trace, own, slots=8, tokens=32, blocks=None, block_size=16)
    assert batches.tokens == whole.tokens == chunked.tokens
    assert whole.steps < batches.steps
    assert whole.seconds < batches.seconds
    assert max(chunked.gaps) < max(whole.gaps)
    assert len(whole.ttft) == 80


def test_the_split_between_blocks_and_state_slots() -> None:
    own = machine("hybrid")
    split = split_of([Arrival(0, 100, 20), Arrival(0, 10, 60)], own, "1MiB", 16)
    assert split["mean_live_tokens"] == (20 * 110 + 60 * 40) / 80
    assert split["rows"] * own.state_bytes == split["state_slots_bytes"]
    assert split["state_slots_bytes"] + split["kv_bytes"] == 1 << 20
    assert split["kv_blocks"] * 16 >= split["rows"] * split["mean_live_tokens"] * 0.95


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no request"),
        ('{"prompt_tokens": 3}', ":1: expected"),
        ("\n[1]", ":2: expected"),
        ('{"prompt_tokens": 0, "output_tokens": 3}', "at least 1 token"),
    ],
)
def test_a_line_of_a_trace_that_is_wrong(text, why, tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=why):
        read_trace(path)
    path.write_text(json.dumps({"prompt_tokens": 3, "output_tokens": 2}))
    assert read_trace(path) == [Arrival(0.0, 3, 2)]
