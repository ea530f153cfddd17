"""The laws of a rule."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.random import Stream, prompt_digest
from decodekit.core.types import Request, Rows
from decodekit.runtime.pipeline import select
from decodekit.testing.values import broken, check_value, same


def make_rows(
    histories: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int] | None = None,
    *,
    eos: tuple[int, ...] = (1,),
    states: Sequence[Any] = (),
    seed: int = 0,
    beyond: int = 0,
) -> Rows:
    """Positions as a rule sees them, one a history.

    Args:
        histories: [P] token ids, prompt and then output; lengths may differ.
        prompt_lengths: [P] how many of them are the prompt; all of them by default.
        eos: ids that end a sequence.
        states: [P] the rule's state at each position.
        seed: of the random streams, which differ from row to row.
        beyond: the id that fills the columns behind a history.
    """
    lengths = [len(history) for history in histories]
    prompts = lengths if prompt_lengths is None else list(prompt_lengths)
    width = max(lengths)
    return Rows(
        tokens=torch.tensor([[*history, *[beyond] * (width - len(history))] for history in histories]),
        lengths=torch.tensor(lengths),
        prompt_lengths=torch.tensor(prompts),
        requests=range(len(histories)),
        streams=[
            Stream(seed, sample, prompt_digest(history[:prompt]))
            for sample, (history, prompt) in enumerate(zip(histories, prompts, strict=True))
        ],
        eos=eos,
        states=states,
    )


def check_rule(
    rule: Rule,
    *,
    vocab_size: int = 97,
    tokenizer: Any = None,
    eos: tuple[int, ...] = (1,),
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    seed: int = 0,
    rows: Rows | None = None,
) -> None:
    """Check the laws that every rule obeys, whatever it does.

    It is a value: frozen, hashable, equal to what its own dump builds. It keeps shape and dtype, edits nothing it is
    given, brings no masked token back, makes no NaN or infinity out of finite logits, gives the same result twice. A
    position depends on itself alone: not on its neighbours or their order, on a NaN among them, or on what lies beyond
    its history. States are values. A ``sampling_only`` rule keeps the most likely token, unless ``keeps_best`` is off.

    Args:
        rule: the rule; its texts are resolved with ``tokenizer``.
        vocab_size: number of tokens of the logits.
        tokenizer: for a rule with texts among its options.
        eos: ids that end a sequence.
        dtypes: the dtypes of logits to try.
        seed: of the histories and logits.
        rows: positions where the rule does something, when histories drawn at random would not show it.

    Raises:
        AssertionError: names the law that does not hold, and where.
    """
    check_value(rule)
    rule = rule.resolve(tokenizer)
    check_value(rule)
    generator = torch.Generator().manual_seed(seed)
    if rows is None:
        rows = _repetitive_rows(vocab_size, eos, seed, generator)
    if not rows.states:
        rows = replace(rows, states=_check_states(rule, rows, vocab_size, generator))
    for dtype in dtypes:
        _RuleLaws(rule, rows, _telling_logits(len(rows), vocab_size, generator).to(dtype), generator).check()


def _repetitive_rows(vocab_size: int, eos: tuple[int, ...], seed: int, generator: torch.Generator) -> Rows:
    """Histories of different lengths over few tokens, so that penalties and n-gram bans have something to see."""
    lengths, prompt_lengths = [1, 4, 7, 7, 12, 19, 23, 30], [1, 4, 3, 6, 2, 10, 23, 5]
    few = torch.randperm(vocab_size, generator=generator)[:6]
    histories = [few[torch.randint(len(few), (length,), generator=generator)].tolist() for length in lengths]
    return make_rows(histories, prompt_lengths, eos=eos, seed=seed, beyond=int(few[0]))


def _telling_logits(positions: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """[P, V] float64: rows that are plain, full of ties, flat, far apart, and with masked tokens."""
    logits = 4 * torch.randn(positions, vocab_size, generator=generator, dtype=torch.float64)
    logits[1::5] = logits[1::5].round()
    logits[2::5] = logits[2::5, :1]
    logits[3::5] *= 50
    masked = torch.rand(positions, vocab_size, generator=generator) < 0.3
    masked[::2] = False
    # One row has a single token left.
    masked[-1] = True
    masked[-1, vocab_size // 2] = False
    return logits.masked_fill(masked, -math.inf)


def _check_states(rule: Rule, rows: Rows, vocab_size: int, generator: torch.Generator) -> list[Any]:
    """The rule's state at each position, reached by committing the output of its history."""
    law = "states are values"
    states = []
    for position, (history, length, prompt) in enumerate(
        zip(rows.tokens.tolist(), rows.lengths.tolist(), rows.prompt_lengths.tolist(), strict=True)
    ):
        request = Request(position, tuple(history[:prompt]), rows.streams[position])
        state = rule.init_state(request)
        for token in history[prompt:length]:
            logits = torch.randn(vocab_size, generator=generator)
            earlier, given = copy.deepcopy(state), logits.clone()
            following = rule.commit(state, token, logits)
            if not same(state, earlier):
                raise broken(rule, law, f"commit changed {earlier!r} to {state!r}; return a new state")
            if not same(logits, given):
                raise broken(rule, law, "commit edited the logits it was given")
            if not same(rule.commit(state, token, logits), following):
                raise broken(rule, law, f"commit gave two different states for {earlier!r} and token {token}")
            state = following
        if not same(rule.init_state(request), rule.init_state(request)):
            raise broken(rule, law, f"init_state gave two different states for request {position}")
        states.append(state)
    return states


@dataclass(frozen=True)
class _RuleLaws:
    """The laws of a rule on given positions and logits."""

    rule: Rule
    rows: Rows
    logits: Tensor
    generator: torch.Generator

    def check(self) -> None:
        result = self.call(self.rows, self.logits)
        self.check_masked_and_finite(result)
        self.check_argmax(result)
        self.compare("the same result twice", result, self.call(self.rows, self.logits))
        self.compare("what lies beyond a history means nothing", result, self.call(self.with_other_junk(), self.logits))
        order = torch.randperm(len(self.rows), generator=self.generator)
        self.compare(
            "permuted positions give permuted results",
            result[order],
            self.call(select(self.rows, order.tolist()), self.logits[order]),
        )
        for position, length in enumerate(self.rows.lengths.tolist()):
            alone = select(self.rows, [position])
            alone = replace(alone, tokens=alone.tokens[:, :length])
            self.compare(
                f"batched = alone, position {position}",
                result[position : position + 1],
                self.call(alone, self.logits[position : position + 1]),
            )
        for where in (slice(None), slice(0, 1)):
            poisoned = self.logits.clone()
            poisoned[0, where] = math.nan
            self.compare(
                "a NaN harms no other position", result[1:], self.call(self.rows, poisoned)[1:], first_position=1
            )

    def call(self, rows: Rows, logits: Tensor) -> Tensor:
        """The rule's result, with everything checked that holds of every call."""
        given, tokens, states = logits.clone(), rows.tokens.clone(), copy.deepcopy(rows.states)
        try:
            result = self.rule(rows, logits)
        except Exception as error:
            raise self.broken("any rows and logits are taken", f"{type(error).__name__}: {error}") from error
        expected, found = f"{tuple(logits.shape)} {logits.dtype}", f"{tuple(result.shape)} {result.dtype}"
        if found != expected:
            raise self.broken("shape and dtype are kept", f"{found} instead of {expected}")
        self.compare("given logits are not edited", given, logits)
        if not (same(rows.tokens, tokens) and same(rows.states, states)):
            raise self.broken("given rows are not edited", "tokens or states changed during the call")
        return result

    def check_masked_and_finite(self, result: Tensor) -> None:
        back = (self.logits == -math.inf) & (result != -math.inf)
        if back.any():
            position, token = back.nonzero()[0].tolist()
            raise self.broken(
                "masked tokens stay masked",
                f"token {token} of position {position} was -inf and became {result[position, token]:g}",
            )
        wild = result.isnan() | (result == math.inf)
        if wild.any():
            position, token = wild.nonzero()[0].tolist()
            raise self.broken(
                "finite logits give no NaN and no infinity",
                f"token {token} of position {position} was {self.logits[position, token]:g} and became "
                f"{result[position, token]:g}",
            )

    def check_argmax(self, result: Tensor) -> None:
        if not (self.rule.sampling_only and self.rule.keeps_best):
            return
        best = _first_best(self.logits)
        for position, (before, after) in enumerate(zip(best.tolist(), _first_best(result).tolist(), strict=True)):
            # Rounding may let a later token draw level, which greedy decoding does not see.
            if result[position, before] != result[position, after] or result[position, before] == -math.inf:
                raise self.broken(
                    "a sampling_only rule keeps the most likely token",
                    f"token {before} of position {position} became {result[position, before]:g}, token {after} is at "
                    f"{result[position, after]:g}",
                )

    def with_other_junk(self) -> Rows:
        tokens, order = self.rows.tokens, torch.randperm(self.rows.tokens.numel(), generator=self.generator)
        # Taken from the histories: tokens that would matter if they were read.
        return replace(
            self.rows, tokens=tokens.where(self.rows.within("both"), tokens.flatten()[order].view_as(tokens))
        )

    def compare(self, law: str, expected: Tensor, found: Tensor, *, first_position: int = 0) -> None:
        differs = (expected != found) & ~(expected.isnan() & found.isnan())
        if differs.any():
            position, token = differs.nonzero()[0].tolist()
            raise self.broken(
                law,
                f"token {token} of position {position + first_position} is {found[position, token]:.9g} instead of "
                f"{expected[position, token]:.9g}; {int(differs.sum())} of {differs.numel()} differ",
            )

    def broken(self, law: str, found: str) -> AssertionError:
        return broken(self.rule, law, f"{found} ({self.logits.dtype})")


def _first_best(logits: Tensor) -> Tensor:
    """[P] the lowest id among the most likely tokens."""
    ids = torch.arange(logits.shape[-1]).expand_as(logits)
    return ids.where(logits == logits.amax(-1, keepdim=True), logits.shape[-1]).amin(-1)
