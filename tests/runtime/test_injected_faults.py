"""Faults at every place of a call: the cache is as if it had not been, neighbours get their tokens, and the next call works."""

import contextlib
import math
from typing import Literal

import pytest
import torch

import decodekit
from decodekit.cache import allocator, blocks, gather, gathered, paged, rectangle, rows, states, stepping, steps
from decodekit.cache.allocator import Allocator, OutOfBlocks
from decodekit.cache.paged import PagedCache
from decodekit.core.compat import CACHE_KEY
from decodekit.core.errors import DecodekitError, PluginError, RowError
from decodekit.core.protocols import Rule, TokenStrategy
from decodekit.recipe import Recipe
from decodekit.runtime import call, choosing, decoder, forward, loop, pipeline, session, speculation, tasks
from decodekit.testing import tiny_model
from tests.cache import interrupts
from tests.runtime.oracle import Oracle
from tests.strategies.golden import left_pad

pytestmark = pytest.mark.integration

PROMPTS = [[5, 17, 42, 8, 9, 30], [9, 9, 30, 61, 77, 12, 4], [50, 3]]
OPTIONS = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
RECIPES = {
    "plain": {},
    "cfg": {"strategy": {"kind": "cfg", "guidance_scale": 2.0}},
    "beam": {"strategy": {"kind": "beam", "num_beams": 3}},
    "drafts": {"drafter": {"kind": "ngram", "schedule": "constant"}},
}


QUICK = {("dense", "plain"), ("sliding", "beam"), ("hybrid", "drafts"), ("dense", "cfg")}
PAIRS = [
    pytest.param(family, name, marks=[] if (family, name) in QUICK else pytest.mark.slow)
    for family in ("dense", "sliding", "hybrid")
    for name in RECIPES
]


class Fault(BaseException):
    """Stands for a KeyboardInterrupt."""


class Faulty(Rule):
    """Goes wrong in one way, at one place, at one step."""

    kind: Literal["faulty"] = "faulty"
    hook: str
    how: str = "raise"
    step: int = 0

    def _fail(self) -> None:
        if self.how == "interrupt":
            raise Fault
        raise ZeroDivisionError("broken")

    def resolve(self, tokenizer):
        if self.hook == "resolve":
            self._fail()
        return self

    def init_state(self, request):
        if self.hook == "init_state" and request.id == 1:
            self._fail()
        return 0

    def commit(self, state, token, logits):
        if self.hook == "commit" and state == self.step:
            self._fail()
        return state + 1

    def __call__(self, rows, logits):
        if self.hook != "call" or self.step not in rows.positions.tolist():
            return logits
        if self.how == "shape":
            return logits[:, :-1]
        if self.how == "dtype":
            return logits.long()
        if self.how == "nothing":
            return None
        if self.how == "edit":
            return logits.fill_(0.0)
        self._fail()


class Breaking(TokenStrategy):
    """A strategy that goes wrong."""

    kind: Literal["breaking"] = "breaking"
    hook: str
    how: str = "raise"

    def branches(self, request):
        if self.hook == "branches":
            raise ZeroDivisionError("broken")
        return super().branches(request)

    def score(self, outputs):
        logits = outputs["main"].logits
        if self.hook == "score" and self.how == "raise":
            raise ZeroDivisionError("broken")
        return {"shape": logits[:, :-1], "dtype": logits.long(), "none": None}[self.how]


def new_cache(model, **options) -> PagedCache:
    return PagedCache(model.config, **{"num_blocks": 256, "block_size": 4, **options})


def decode(model, decoder, cache, prompts=PROMPTS, **options):
    inputs = left_pad(prompts)
    ids = model.generate(**inputs, custom_generate=decoder, **{**OPTIONS, CACHE_KEY: cache, **options})
    return ids[:, inputs["input_ids"].shape[1] :].tolist()


def check_unharmed(model, cache, expected, recipe=None) -> None:
    """Nothing is held, what is cached is sound, and a call over the very same cache gives the right tokens."""
    assert cache.rows == []
    assert not cache._book.recording
    for group in cache.groups:
        inner = group.pool._allocator
        assert inner.used == 0
        assert inner.references == [0] * inner.num_blocks
        assert sorted([*inner.free, *inner.cached]) == [*range(inner.num_blocks)]
        for block, chain in enumerate(inner.chains):
            assert chain is None or block in chain.holders
    assert decode(model, decodekit.load(recipe or {}), cache) == expected
    assert all(group.pool.used_blocks == 0 for group in cache.groups)


@pytest.mark.parametrize("how", ["raise", "interrupt"])
@pytest.mark.parametrize(
    ("hook", "step"), [("resolve", 0), ("init_state", 0), ("call", 0), ("call", 3), ("commit", 0), ("commit", 5)]
)
def test_a_rule_that_fails_anywhere(model, hook, step, how) -> None:
    cache = new_cache(model)
    expected = decode(model, decodekit.load({}), new_cache(model))
    faulty = decodekit.Decoder(Recipe(rules=(Faulty(hook=hook, step=step, how=how),)))
    with pytest.raises(
        Fault if how == "interrupt" else PluginError, match=None if how == "interrupt" else "faulty.*broken"
    ):
        decode(model, faulty, cache)
    check_unharmed(model, cache, expected)


@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shape", r"returned \(3, 96\)"),
        ("dtype", r"torch.int64; expected \(3, 97\)"),
        ("nothing", "returned NoneType"),
        ("edit", "edited the logits it was given"),
    ],
)
def test_a_rule_that_returns_what_it_must_not(dense, how, message, step) -> None:
    cache, expected = new_cache(dense), decode(dense, decodekit.load({}), new_cache(dense))
    with pytest.raises(PluginError, match=f"rule 'faulty' .*{message}"):
        decode(dense, decodekit.Decoder(Recipe(rules=(Faulty(hook="call", how=how, step=step),))), cache)
    check_unharmed(dense, cache, expected)


@pytest.mark.parametrize("how", ["raise", "shape", "dtype", "none"])
@pytest.mark.parametrize("hook", ["branches", "score"])
def test_a_strategy_that_fails(dense, hook, how) -> None:
    cache, expected = new_cache(dense), decode(dense, decodekit.load({}), new_cache(dense))
    with pytest.raises(PluginError, match="breaking"):
        decode(dense, decodekit.Decoder(Recipe(strategy=Breaking(hook=hook, how=how))), cache)
    check_unharmed(dense, cache, expected)


class Alone(Rule):
    """Fails one row at one step, in one way."""

    kind: Literal["alone"] = "alone"
    step: int
    how: str

    def __call__(self, rows, logits):
        mine = (rows.positions == self.step) & (rows.tokens[:, 0] == 9)
        if self.how == "raise" and bool(mine.any()):
            raise RowError("enough")
        value = {"nan": math.nan, "inf": math.inf, "empty": -math.inf}.get(self.how, 0.0)
        return logits if self.how == "raise" else torch.where(mine.unsqueeze(-1), value, logits)


@pytest.mark.parametrize("how", ["raise", "nan", "inf", "empty"])
def test_neighbours_of_a_row_that_fails_get_their_tokens(model, how) -> None:
    cache, expected = new_cache(model), decode(model, decodekit.load({}), new_cache(model))
    for step in range(6):
        with pytest.warns(RuntimeWarning, match=r"row 1 \(prompt 1\) ended early"):
            found = decode(model, decodekit.Decoder(Recipe(rules=(Alone(step=step, how=how),))), cache)
        assert found == [expected[0], expected[1][:step] + [0] * (6 - step), expected[2]]
    check_unharmed(model, cache, expected)


class Streamer:
    def __init__(self, fail_at: int, error: type[BaseException]) -> None:
        self.left, self.error, self.ended = fail_at, error, 0

    def put(self, row, tokens) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize(("family", "name"), [pair for pair in PAIRS if pair.values[1] != "beam"])
def test_a_streamer_that_fails_at_any_step(family, name) -> None:
    model, recipe = tiny_model(family, dtype=torch.float64), RECIPES[name]
    cache, expected = new_cache(model), decode(model, decodekit.load(recipe), new_cache(model))
    kept = []  # as an interactive session keeps the last error, with all that its frames hold
    for fail_at in (0, 4, 17):
        for error in (OSError, Fault):
            streamer = Streamer(fail_at, error)
            with pytest.raises(error) as caught:
                decode(model, decodekit.load(recipe), cache, dk_streamer=streamer)
            kept.append(caught)
            assert streamer.ended == 1
            check_unharmed(model, cache, expected, recipe)


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_a_pool_that_is_exhausted_at_any_allocation(family, name, monkeypatch) -> None:
    model, recipe, honest = tiny_model(family, dtype=torch.float64), RECIPES[name], Allocator.choose
    expected, count = decode(model, decodekit.load(recipe), new_cache(model)), [0]

    def counting(self, wanted):
        count[0] += 1
        if count[0] == fail_at:
            raise OutOfBlocks(wanted, 0, 0, self.num_blocks)
        return honest(self, wanted)

    monkeypatch.setattr(Allocator, "choose", counting)
    cache, fail_at, failed = new_cache(model), 1, 0
    while True:
        count[0] = 0
        try:
            assert decode(model, decodekit.load(recipe), cache) == expected
            break
        except OutOfBlocks:
            failed += 1
        count[0] = -1 << 30
        check_unharmed(model, cache, expected, recipe)
        fail_at += 1
    assert failed >= 8


def test_a_pool_that_is_too_small_is_a_clear_error(model) -> None:
    cache = new_cache(model, num_blocks=5)
    with pytest.raises(OutOfBlocks, match=r"blocks needed, \d free"):
        decode(model, decodekit.load({}), cache)
    assert all(group.pool.used_blocks == 0 for group in cache.groups)
    assert decode(model, decodekit.load({}), cache, PROMPTS[2:]) == decode(
        model, decodekit.load({}), new_cache(model), PROMPTS[2:]
    )


def knowing(model):
    plain = decode(model, decodekit.load({}), new_cache(model))
    truth = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)}
    return decodekit.Decoder(Recipe(drafter=Oracle(truth=truth, tree=True, schedule="constant")))


# Every so many lines; a prime, so that loops of any length are met at all of their lines.
@pytest.mark.parametrize("stride", [797, pytest.param(53, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "name"), [pair for pair in PAIRS if pair.values[1] != "cfg"])
def test_a_call_that_is_interrupted_at_any_line(family, name, stride, monkeypatch) -> None:
    model = tiny_model(family, dtype=torch.float64, layers=2)
    modules = [allocator, blocks, gather, gathered, paged, rectangle, rows, states, stepping, steps]
    modules += [call, choosing, decoder, forward, loop, pipeline, session, speculation, tasks]
    monkeypatch.setattr(interrupts, "SOURCES", {module.__file__ for module in modules})
    using = knowing(model) if name == "drafts" else decodekit.load(RECIPES[name])
    expected, cache = decode(model, using, new_cache(model)), new_cache(model)
    line, interrupted = 1, 0
    while True:
        try:
            with interrupts.interrupted(line):
                assert decode(model, using, cache) == expected
            break
        except interrupts.Interrupted:
            interrupted += 1
        # Whatever it was in the middle of, the next call is right and leaves nothing.
        assert decode(model, using, cache) == expected
        assert all(group.pool.used_blocks == 0 for group in cache.groups)
        assert not cache._book.recording
        line += stride
    assert interrupted > 2


@pytest.mark.parametrize("name", RECIPES)
def test_errors_are_decodekits_own(dense, name) -> None:
    """Whatever the fault, what the caller catches says which plugin it was; nothing else gets through."""
    for hook in ("init_state", "call", "commit"):
        recipe = decodekit.load(RECIPES[name]).recipe.model_copy(update={"rules": (Faulty(hook=hook),)})
        with contextlib.suppress(DecodekitError):
            decode(dense, decodekit.Decoder(recipe), new_cache(dense))
            pytest.fail("nothing was raised")
