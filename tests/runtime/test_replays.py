"""Single steps whose forward was captured give the tokens of those that are launched. A CPU runs all but the capture itself."""

import copy
import gc
import weakref

import pytest
import torch

import decodekit
from decodekit.cache.fixed import FixedStep
from decodekit.cache.paged import PagedCache
from decodekit.kernels.paged_attention import WorkShape
from decodekit.recipe import Generation, Recipe
from decodekit.runtime.capture import GraphStats, look
from decodekit.runtime.decoder import Decoder
from decodekit.runtime.engine import Engine
from decodekit.runtime.graphs import Graphs
from decodekit.runtime.paged_session import PagedSession
from decodekit.runtime.places import PlacedSession
from decodekit.runtime.replays import Replays
from decodekit.testing import tiny_model
from tests.runtime.conftest import PROMPTS
from tests.runtime.oracle import Oracle
from tests.runtime.schedules import live_once

NEW = 24


@pytest.fixture
def replays(monkeypatch, in_place, captured, fills):
    """Counts the steps that a captured forward took and their tokens; nothing comes from runs."""
    monkeypatch.setattr(Graphs, "takes", lambda self, live: False)
    seen = {"steps": 0, "tokens": set(), "sessions": []}
    step = Replays.step

    def counted(self, session, places, tokens):
        outputs = step(self, session, places, tokens)
        seen["steps"] += outputs is not None
        if outputs is not None:
            seen["tokens"].add(sum(map(len, tokens)))
        if self not in seen["sessions"]:
            seen["sessions"].append(self)
        return outputs

    monkeypatch.setattr(Replays, "step", counted)
    return seen


def size_of(tokens, *_):
    return next(size for size in (1, 2, 4, 8, 16, 32, 64) if size >= tokens)


@pytest.fixture
def sizes(monkeypatch):
    """Forwards have other numbers of tokens than are asked for."""
    monkeypatch.setattr("decodekit.runtime.replays.bucket", size_of)


def decode(model, recipe, inputs, **options):
    decoder = recipe if isinstance(recipe, Decoder) else decodekit.load(recipe)
    options = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(**inputs, custom_generate=decoder, **options)


def launched(model, recipe, inputs, **options):
    """The same, operation by operation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replays, "step", lambda self, session, places, tokens: None)
        return decode(model, recipe, inputs, **options)


def oracle(model, inputs, *, tree=False, generation=None):
    """A drafter that knows what this model says."""
    generation = Generation(**(generation or {}))
    plain = launched(model, Decoder(Recipe(generation=generation)), inputs)
    width = inputs["input_ids"].shape[1]
    pads = (inputs["attention_mask"] == 0).sum(1).tolist()
    prompts = [tuple(row[pad:width]) for row, pad in zip(inputs["input_ids"].tolist(), pads, strict=True)]
    truth = {prompt: row[width:] for prompt, row in zip(prompts, plain.tolist(), strict=True)}
    return plain, Decoder(Recipe(drafter=Oracle(truth=truth, schedule="constant", tree=tree), generation=generation))


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("family", ["dense", "sliding"])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("generation", [{}, {"do_sample": True, "seed": 5}], ids=["greedy", "sampled"])
def test_drafts_are_verified_by_captured_forwards(replays, padded, family, tree, batch, generation) -> None:
    model, inputs = tiny_model(family, dtype=torch.float64), padded(PROMPTS[:batch])
    plain, decoder = oracle(model, inputs, tree=tree, generation=generation)
    assert replays["steps"] == 0
    assert torch.equal(decode(model, decoder, inputs), plain)
    assert replays["steps"] >= 2
    assert max(replays["tokens"]) > batch
    [used] = [own for own in replays["sessions"] if own.stats.forwards]
    # The first of each size is launched.
    assert used.stats.forwards == replays["steps"] - len({size_of(tokens) for tokens in replays["tokens"]})
    assert 1 <= used.stats.forward_captures <= 8
    assert used.stats.alone is None


@pytest.mark.parametrize(
    "recipe",
    [
        {"strategy": {"kind": "beam", "num_beams": 3}},
        {"strategy": {"kind": "contrastive_search", "top_k": 3, "penalty_alpha": 0.5}},
        {"strategy": {"kind": "best_of_n", "n": 3, "scorer": "logprob"}, "generation": {"do_sample": True, "seed": 1}},
        {"strategy": {"kind": "cfg", "guidance_scale": 1.5}},
        {"strategy": {"kind": "dola"}},
    ],
    ids=lambda recipe: recipe["strategy"]["kind"],
)
@pytest.mark.parametrize("family", ["dense", "sliding"])
def test_other_strategies_take_their_steps_from_captured_forwards(replays, padded, family, recipe) -> None:
    model, inputs = tiny_model(family, dtype=torch.float64), padded(PROMPTS[:3])
    expected = launched(model, recipe, inputs)
    assert torch.equal(decode(model, recipe, inputs), expected)
    assert replays["steps"] >= 8


def test_a_size_is_captured_once_it_was_asked_for_some_times(replays, dense, padded) -> None:
    inputs = padded(PROMPTS[:3])
    decode(dense, {"cache": "paged"}, inputs)
    [own] = replays["sessions"]
    # The first token comes from the prompts, one step is launched.
    assert (own.stats.forwards, own.stats.forward_captures) == (NEW - 2, 1)


@pytest.mark.usefixtures("sizes")
def test_requests_of_an_engine_share_captured_forwards(replays, dense, tokenizer) -> None:
    with Engine(dense, tokenizer, {"cache": "paged"}, slots=4, tokens_per_step=64) as engine:
        requests = [engine.submit(ids, max_new_tokens=9, eos_token_id=None) for ids in PROMPTS[:3]]
        together = [request.result().token_ids for request in requests]
        alone = engine.submit(PROMPTS[0], max_new_tokens=4, eos_token_id=None).result().token_ids
        assert {key[-1] for key in engine._batch.sessions[0].cache.captured} == {1, 4}
        stats = engine.stats()["replays"]["main"]
    assert alone == together[0][:4]
    assert (stats["forwards"], stats["forward_captures"]) == (8 - 1 + 3 - 1, 2)
    assert replays["tokens"] == {1, 3}


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(
    ("family", "seeds"),
    [
        ("dense", range(12)),
        ("sliding", range(12, 24)),
        *(pytest.param(family, range(60), marks=pytest.mark.slow) for family in ("dense", "sliding")),
    ],
)
def test_requests_of_an_engine_have_the_tokens_of_their_solo_runs(replays, family, seeds) -> None:
    for seed in seeds:
        live_once(seed, family)
    assert replays["steps"] > 3 * len(seeds)


@pytest.mark.usefixtures("sizes")
def test_another_forward_is_captured_where_rows_have_grown_too_long(replays, dense, padded, monkeypatch) -> None:
    monkeypatch.setattr("decodekit.kernels.paged_attention.work.SPLITS", (8, 16))
    inputs = padded([PROMPTS[2]])
    recipe = {"cache": {"kind": "paged", "block_size": 4}}
    expected = launched(dense, recipe, inputs, max_new_tokens=90)
    assert torch.equal(decode(dense, recipe, inputs, max_new_tokens=90), expected)
    [own] = replays["sessions"]
    assert own.stats.forwards == 88
    assert 2 <= own.stats.forward_captures <= 6


def test_where_it_cannot_be_captured_steps_are_launched(replays, dense, padded, monkeypatch, caplog) -> None:
    inputs = padded(PROMPTS[:3])
    expected = launched(dense, {"cache": "paged"}, inputs)
    framed = PlacedSession.framed

    def refuse(self, frame: FixedStep):
        framed(self, frame)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(PlacedSession, "framed", refuse)
    with caplog.at_level("WARNING", "decodekit.runtime.replays"):
        assert torch.equal(decode(dense, {"cache": "paged"}, inputs), expected)
    [own] = replays["sessions"]
    assert (own.stats.forwards, own.stats.alone) == (0, "operation not permitted when stream is capturing")
    assert len(caplog.records) == 1


def test_hooks_are_called_at_every_step(replays, padded) -> None:
    model, inputs, called = tiny_model("dense", dtype=torch.float64), padded(PROMPTS[:3]), []
    decode(model, {"cache": "paged"}, inputs)
    assert replays["steps"] == NEW - 1
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *given: called.append(1))
    decode(model, {"cache": "paged"}, inputs)
    handle.remove()
    assert len(called) == NEW
    assert replays["steps"] == NEW - 1


def test_a_hook_that_comes_while_it_decodes_is_noticed(replays, dense, tokenizer) -> None:
    model, called, pieces = tiny_model("dense", dtype=torch.float64), [], 0
    decoder = decodekit.load({"cache": "paged"})
    stream = decoder.stream(model, tokenizer, "ab", max_new_tokens=NEW, eos_token_id=None)
    for pieces, _ in enumerate(stream, 1):
        if pieces == 12:
            assert replays["steps"] > 0
            model.model.norm.register_forward_hook(lambda *given: called.append(1))
    assert len(called) == NEW - 12 > 0


@pytest.mark.parametrize("quantization", ["int8"])
def test_quantized_blocks_and_states_are_left_to_launched_steps(replays, padded, quantization) -> None:
    inputs = padded(PROMPTS[:3])
    decode(tiny_model("hybrid", dtype=torch.float64), {"cache": "paged"}, inputs)
    decode(tiny_model("dense"), {"cache": {"kind": "paged", "quantization": quantization}}, inputs)
    assert replays["steps"] == 0


def test_room_for_two_shapes_holds_both() -> None:
    one = WorkShape(4, 7, ((16, 3), (64, 2)), 5, 4, 9)
    other = WorkShape(4, 6, ((64, 6),), 8, 1, 10)
    both = one.joined(other)
    assert both == WorkShape(4, 7, ((16, 3), (64, 6)), 8, 4, 10)
    assert both.holds(one)
    assert both.holds(other)
    assert not one.holds(other)


def test_memory_of_a_session_does_not_wait_for_the_garbage_collector(dense) -> None:
    session = PagedSession(dense, PagedCache(dense.config, num_blocks=4, block_size=16))
    gone = weakref.ref(session)
    gc.disable()
    try:
        del session
        assert gone() is None
    finally:
        gc.enable()


def test_the_output_counts_them(replays, dense, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("decodekit.runtime.text_call.captures", lambda device: True)
    recipe = {"strategy": {"kind": "beam", "num_beams": 3}}
    [output] = decodekit.load(recipe).run(dense, tokenizer, ["ab"], max_new_tokens=9, eos_token_id=None)
    stats = output.stats["graphs"]
    assert (stats["forwards"], stats["forward_captures"], stats["steps"]) == (replays["steps"] - 1, 1, 0)
    assert stats["eager"] == "strategy 'beam' decides between steps"


def test_figures_of_several_are_added() -> None:
    both = GraphStats(steps=3, pool_bytes=5, eager="drafts").joined(
        [GraphStats(forwards=2, pool_bytes=4, alone="float64")]
    )
    assert both == GraphStats(steps=3, forwards=2, pool_bytes=9, eager="drafts", alone="float64")


def caches_made(monkeypatch):
    made, init = [], PagedCache.__init__

    def noted(self, *args, **options):
        init(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(PagedCache, "__init__", noted)
    return made


def test_a_draft_model_gives_its_memory_back(replays, dense, padded, monkeypatch) -> None:
    monkeypatch.setattr("decodekit.runtime.drafting.triton_runs", lambda device: True)
    made, inputs = caches_made(monkeypatch), padded(PROMPTS[:2])
    decoder = decodekit.load({"drafter": {"kind": "draft_model", "model": "small", "schedule": "constant"}})
    expected = launched(dense, {"cache": "paged"}, inputs)
    made.clear()
    assert torch.equal(decode(dense, decoder.bind(models={"small": tiny_model("dense")}), inputs), expected)
    [draft] = [cache for cache in made if cache.preallocated]
    assert (draft.stats()["kv_bytes"], draft.captured) == (0, {})
    assert len([own for own in replays["sessions"] if own.stats.forwards]) == 2


def test_draft_models_of_an_engine_take_memory_as_rows_grow(replays, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("decodekit.runtime.drafting.triton_runs", lambda device: True)
    made, recipe = caches_made(monkeypatch), {"cache": "paged", "drafter": {"kind": "draft_model", "model": "small"}}
    with Engine(tiny_model("dense"), tokenizer, recipe, "8MiB", models={"small": tiny_model("dense")}) as engine:
        for temperature in (0.5, 0.6):
            options = {"do_sample": True, "temperature": temperature, "eos_token_id": None}
            engine.submit(PROMPTS[0], max_new_tokens=6, **options).result()
        sizes = [cache.stats()["kv_bytes"] for cache in made[1:]]
    assert len(sizes) == 2
    assert all(0 < size < 2**20 for size in sizes)
    assert [cache.stats()["kv_bytes"] for cache in made] == [0, 0, 0]


def test_what_was_replaced_in_a_model_is_not_held() -> None:
    model = tiny_model("dense")
    before, layer = look(model), model.model.layers[0].mlp
    old = weakref.ref(layer.up_proj)
    layer.up_proj = torch.nn.Linear(*reversed(layer.up_proj.weight.shape), bias=False)
    gc.collect()
    assert old() is None
    assert look(model).number != before.number


def test_a_copy_of_a_model_is_looked_at_anew(tmp_path) -> None:
    model = tiny_model("dense")
    found = look(model)
    assert look(model) is found
    assert look(copy.deepcopy(model)).number != found.number
    torch.save(model, tmp_path / "model.pt")
    assert look(torch.load(tmp_path / "model.pt", weights_only=False)).number != found.number
