"""Random lives of an engine: what is submitted when, with which recipe and limits, and what becomes of it."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, ClassVar, Literal

import torch

import decodekit
from decodekit.cache.ledger import ledger
from decodekit.core.errors import InputError
from decodekit.core.protocols import Rule
from decodekit.recipe import Generation, Recipe, load_recipe
from decodekit.runtime.call import assemble
from decodekit.runtime.engine import Engine
from decodekit.runtime.text_call import prepare
from decodekit.runtime.work import Given
from decodekit.testing import tiny_model, tiny_tokenizer

BLOCK = 4
SHARED = [5, 17, 42, 8, 61, 9, 33, 12]
PROMPTS = [[7], [50, 3], SHARED[:4], SHARED, [*SHARED, 70], [*SHARED[:4], 90, 91], [23, 88, 64, 10, 11, 12, 13]]
SAMPLED = {"rules": [{"kind": "temperature", "t": 0.8}], "generation": {"do_sample": True, "seed": 3}}
RECIPES: list[dict[str, Any]] = [
    {},
    {},
    SAMPLED,
    {**SAMPLED, "generation": {"do_sample": True, "seed": 4}},
    {"rules": [{"kind": "repetition_penalty", "penalty": 1.3}]},
    {"generation": {"do_sample": True, "seed": 5, "top_k": 7}},
    {"rules": [{"kind": "mirostat", "tau": 3.0}], "generation": {"do_sample": True, "seed": 9}},
    {"generation": {"repetition_penalty": 1.4}},
    {"drafter": {"kind": "ngram", "schedule": "constant", "max_tokens": 3}},
    {"drafter": {"kind": "recycle", "max_tokens": 4, "leaves": 3, "schedule": "constant"}},
    {"constraint": {"kind": "regex", "pattern": "[ab]{2}(the|Q)[0-9]{1,8}"}},
    {"strategy": "dola"},
    {"strategy": {"kind": "beam", "num_beams": 2}},
    {"strategy": {"kind": "best_of_n", "n": 2, "scorer": {"kind": "logprob"}}, **SAMPLED},
    {"strategy": {"kind": "contrastive_search"}},
    {"generation": {"do_sample": True, "seed": 6, "num_return_sequences": 2}},
]


class FailsAt(Rule):
    """Fails a request at its third token, as a broken rule or as one that ends a row."""

    kind: Literal["fails_at"] = "fails_at"
    error: str = "ValueError"
    errors: ClassVar[dict[str, type[Exception]]] = {"ValueError": ValueError, "RowError": decodekit.RowError}

    def __call__(self, rows: Any, logits: torch.Tensor) -> torch.Tensor:
        if bool((rows.positions == 2).any()):
            raise self.errors[self.error]("on purpose")
        return logits


@cache
def target(family: str) -> Any:
    return tiny_model(family, layers=2, dtype=torch.float64)


@cache
def tokenizer() -> Any:
    return tiny_tokenizer()


@cache
def alone(family: str, prompt: int, recipe: int, new: int) -> tuple[list[list[int]], list[str]]:
    """Tokens and endings of a request that has the model for itself."""
    return outcome(_recipe(recipe), family, PROMPTS[prompt], new)


def outcome(recipe: Recipe, family: str, prompt: list[int], new: int) -> tuple[list[list[int]], list[str]]:
    prepared = prepare(target(family), tokenizer(), [prompt], recipe, {"max_new_tokens": new})
    given = Given(tokenizer=tokenizer(), want_text=True, keep_logprobs=True, named=frozenset({"max_new_tokens"}))
    call = assemble(target(family), prepared, recipe, given)
    for _ in call.loop.run():
        pass
    sequences = [result.sequence for result in call.results()]
    return [own.tokens for own in sequences], [str(own.finish_reason) for own in sequences]


@cache
def _recipe(number: int) -> Recipe:
    return load_recipe({**RECIPES[number], "cache": {"kind": "paged", "block_size": BLOCK}})


def budget_of(family: str, blocks: int, slots: int) -> int:
    """Bytes that hold so many blocks beside the states of so many rows."""
    own = target(family)
    counted = ledger(own.config, context=BLOCK, batch=1, dtype=own.dtype, block_size=BLOCK)
    states = counted.state_bytes_per_request + counted.conv_bytes_per_request
    return blocks * BLOCK * counted.kv_bytes_per_token + slots * states


def live_once(seed: int, family: str) -> tuple[int, int]:
    """One random schedule; how many requests it had, and how often one was put aside.

    Raises:
        AssertionError: a request's tokens are not those of its solo run, or something is still held.
    """
    rng = random.Random(seed)
    slots = rng.randint(2, 6)
    engine = Engine(
        target(family),
        tokenizer(),
        {"cache": {"kind": "paged", "block_size": BLOCK}},
        budget=budget_of(family, rng.randint(5, 9), slots),
        slots=slots,
        tokens_per_step=rng.choice([3, 6, 64]),
        policy=rng.choice(["fcfs", "shortest_remaining", "deadline"]),
        promise=rng.choice([0.0, 0.0, 0.3, 1.0]),
        preemption=rng.choice(["recompute", "offload"]),
        patience=rng.choice([2, 8, 256]),
        prefix_cache=rng.random() < 0.7,
    )
    plans = []
    for number in range(rng.choice([1, 2, 3, 4, 4, 4])):
        failing = rng.random() < 0.08
        recipe = FailsAt(error=rng.choice(["ValueError", "RowError"])) if failing else rng.randrange(len(RECIPES))
        arrives, dies = rng.randint(0, 4), rng.randint(0, 14) if rng.random() < 0.15 else None
        plans.append((number, recipe, rng.randrange(len(PROMPTS)), rng.randint(1, 12), arrives, dies))
    requests: dict[int, Any] = {}
    for step in range(400):
        for number, recipe, prompt, new, arrives, dies in plans:
            if arrives == step:
                own = _recipe(recipe) if isinstance(recipe, int) else Recipe(rules=(recipe,), generation=Generation())
                try:
                    requests[number] = engine.submit(PROMPTS[prompt], id=number, recipe=own, max_new_tokens=new)
                except InputError as error:
                    if not any(why in str(error) for why in ("never fits", "no text of constraint", "slots")):
                        raise
            if dies == step and number in requests:
                requests[number].cancel()
                assert requests[number].done
        if not engine.step() and step > 9:
            break
    for number, recipe, prompt, new, _, _ in plans:
        if number in requests:
            _check(requests[number], family, prompt, recipe, new)
    stats = engine.stats()
    for session in engine._batch.sessions:
        assert session.cache.rows == []
        assert all(group["used"] == 0 for group in session.cache.stats()["groups"])
    assert not engine._batch.loop.known
    assert not engine._batch.scheduler.running
    engine.close()
    return len(requests), stats["preemptions"]


def _check(request: Any, family: str, prompt: int, recipe: Any, new: int) -> None:
    outputs = request.results()
    if not isinstance(recipe, int):
        assert outputs[0].finish_reason in ("error", "eos", "length", "cancelled"), outputs
        assert outputs[0].finish_reason != "error" or "on purpose" in outputs[0].error
        return
    tokens, reasons = alone(family, prompt, recipe, new)
    for output, expected, reason in zip(outputs, tokens, reasons, strict=True):
        if output.finish_reason == "cancelled" or outputs[0].finish_reason == "cancelled":
            plain = "strategy" not in RECIPES[recipe]
            assert not plain or output.token_ids == expected[: len(output.token_ids)]
        else:
            told = (family, PROMPTS[prompt], RECIPES[recipe], new, output.error)
            assert (output.token_ids, output.finish_reason) == (expected, reason), told
