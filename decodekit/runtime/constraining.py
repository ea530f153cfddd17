"""Constraints inside the loop: each row's place in its language, masks ready before they are needed.

The mask of a row's next token is filled in a thread while the forward runs, where that leaves a core. A row that may get
only so many tokens is steered so that its text can still end in time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from decodekit.core import registry
from decodekit.core.constraint import CompiledConstraint, ConstraintState, best_of_each, legal_only, mask_words
from decodekit.core.drafts import Draft, DraftHost, DraftRow, DraftState
from decodekit.core.errors import InputError, RowError, UnsupportedConstraint, reason
from decodekit.core.protocols import Constraint, Drafter
from decodekit.core.vetting import vet
from decodekit.core.vocabulary import Vocabulary
from decodekit.kernels.apply_bitmask import apply_bitmask
from decodekit.runtime.guard import guarded

_KEPT = 64
"""Compiled constraints that are kept for later prompts."""

_HANDOVER = 1e-4
"""Seconds of a mask below which a thread is not worth its handover."""

_NEAR = 64
"""Tokens to the limit below which an end is looked for at every token."""


class Constraints:
    """The constraints of a call: the recipe's, and those of single prompts.

    Args:
        recipe: of every prompt that has none of its own.
        tokenizer: the model's.
        width: of the logits.
        eos: ids that end an output.
    """

    def __init__(self, recipe: Constraint | None, tokenizer: Any, width: int, eos: tuple[int, ...]) -> None:
        self._recipe, self._tokenizer, self._width, self._eos = recipe, tokenizer, width, eos
        self._compiled: list[tuple[Constraint, CompiledConstraint]] = []

    def row(self, inputs: Mapping[str, Any], max_new_tokens: int) -> RowConstraint | None:
        """The constraint of a row at its start; ``None`` where it has none.

        Raises:
            UnsupportedConstraint: it cannot be enforced as given.
            InputError: it is no constraint, there is no tokenizer, or no text of so few tokens belongs to it.
        """
        own = inputs.get("constraint", self._recipe)
        if own is None:
            return None
        constraint = cast(Constraint, own if isinstance(own, Constraint) else registry.create("constraints", own))
        if self._tokenizer is None:
            raise InputError(
                f"constraint {constraint.kind!r} needs a tokenizer; give dk_tokenizer=tokenizer or "
                "decoder.bind(tokenizer=...)"
            )
        compiled = self._compile(constraint)
        state = compiled.start()
        if compiled.counts_exactly and not state.ends_within(max_new_tokens):
            raise InputError(
                f"no text of constraint {constraint.kind!r} has at most {max_new_tokens} tokens; raise max_new_tokens or "
                "loosen the constraint"
            )
        marker = Marker(constraint.after, self._tokenizer) if constraint.after else None
        return RowConstraint(constraint, compiled, state, self._width, max_new_tokens, marker)

    def _compile(self, constraint: Constraint) -> CompiledConstraint:
        for known, compiled in self._compiled:
            if known == constraint:
                return compiled
        with guarded(constraint, "compile"):
            vocabulary = Vocabulary.of(self._tokenizer, self._width, self._eos)
            resolved = constraint.resolve(self._tokenizer)
            vet(resolved)
            compiled = resolved.compile(vocabulary)
        self._compiled = [*self._compiled[-_KEPT:], (constraint, compiled)]
        return compiled


class Marker:
    """A text after which a constraint begins.

    Args:
        text: the marker.
        tokenizer: reads the tokens, special ones too.
        tail: the last characters of the output so far.
    """

    def __init__(self, text: str, tokenizer: Any, tail: str = "") -> None:
        self._text, self._tokenizer, self._tail = text, tokenizer, tail

    def seen(self, token: int) -> bool:
        """Whether the output with this token more holds the marker."""
        self._tail = (self._tail + self._tokenizer.decode([token]))[-len(self._text) - 64 :]
        return self._text in self._tail

    def fork(self) -> Marker:
        """A copy that goes its own way."""
        return Marker(self._text, self._tokenizer, self._tail)


class RowConstraint:
    """One row's constraint.

    Args:
        constraint: as it was given.
        compiled: its masks.
        state: the row's place in it.
        width: of the logits.
        left: tokens that the row may still get.
        marker: what it begins after; ``None`` once it has begun.
        look: tokens left at which its end is looked for again; as many as ``left`` by default, that is now.

    Attributes:
        width: of the logits.
    """

    def __init__(
        self,
        constraint: Constraint,
        compiled: CompiledConstraint,
        state: ConstraintState,
        width: int,
        left: int,
        marker: Marker | None,
        look: int | None = None,
    ) -> None:
        self._constraint, self._compiled, self._state = constraint, compiled, state
        self.width, self._left, self._marker = width, left, marker
        self._look = left if look is None else look
        self._ahead: Future[Tensor] | None = None
        self._took = 0.0
        self._failure: UnsupportedConstraint | None = None

    def mask(self) -> Tensor | None:
        """[ceil(V/32)] int32, the tokens that may come next; ``None`` while all may.

        Raises:
            RowError: none may, or the constraint grew too large to be followed any further.
        """
        if self._marker is not None:
            return None
        try:
            if self._failure is not None:
                raise self._failure
            words = self._ahead.result() if self._ahead is not None else self._fill()
        except UnsupportedConstraint as error:
            raise RowError(f"constraint {self._constraint.kind!r} cannot be followed any further: {error}") from error
        self._ahead = None
        if not np.count_nonzero(words.numpy()):
            raise RowError(
                f"constraint {self._constraint.kind!r} leaves no token here: its text cannot go on or end; loosen it"
            )
        return words

    def advance(self, token: int) -> None:
        """Take a token.

        Raises:
            RowError: it is not legal.
        """
        self._settled()
        self._left -= 1
        if self._marker is not None:
            if self._marker.seen(token):
                self._marker = None
        else:
            try:
                self._state.advance(token)
            except UnsupportedConstraint as error:
                self._failure = error  # ends the row at its next mask

    def prefetch(self) -> None:
        """Begin to fill the mask of the next token, in a thread beside the forward, if the last one took long."""
        if self._took < _HANDOVER or self._left < 1:
            return
        if self._marker is None and self._failure is None and self._ahead is None:
            self._ahead = _pool().submit(self._fill)

    def forced(self, limit: int) -> list[int]:
        """The tokens, at most ``limit``, that every way to go on begins with."""
        if self._marker is not None or self._failure is not None or limit < 1:
            return []
        self._settled()
        try:
            return self._state.forced_tokens()[:limit]
        except UnsupportedConstraint as error:
            self._failure = error
            return []

    def legal(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The nodes of a tree that may follow: each with all nodes before it."""
        self._settled()
        places: dict[int, RowConstraint] = {-1: self}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if (before := places.get(parent)) is None:
                continue
            ahead = before.fork()
            try:
                ahead.step(token)
            except (RowError, UnsupportedConstraint):
                continue
            places[node] = ahead
        return sorted(places.keys() - {-1})

    def step(self, token: int) -> None:
        """Take a token without a look at the next mask.

        Raises:
            RowError: it is not legal.
        """
        if self._marker is None:
            self._state.advance(token)
        elif self._marker.seen(token):
            self._marker = None

    def fork(self) -> RowConstraint:
        """A copy that goes its own way."""
        self._settled()
        marker = None if self._marker is None else self._marker.fork()
        state = self._state.fork()
        fork = RowConstraint(self._constraint, self._compiled, state, self.width, self._left, marker, self._look)
        fork._failure, fork._took = self._failure, self._took
        return fork

    def report(self, text: str) -> dict[str, Any]:
        """What holds of a finished text, for ``Output.stats``."""
        report: dict[str, Any] = {"kind": self._constraint.kind, "exact": self._compiled.exact}
        report["complete"] = self._marker is None and self._failure is None and self._state.is_accepting()
        if self._compiled.unsupported:
            why = self._constraint.violation(text)
            report |= {"unsupported": list(self._compiled.unsupported), "valid": why is None}
            if why is not None:
                report["violation"] = why
        return report

    def _fill(self) -> Tensor:
        started = time.perf_counter()
        out = torch.empty(1, mask_words(self.width), dtype=torch.int32)
        far = self._is_far()
        if not far:
            self._state.mask_within(out, 0, self._left)
        if far or not np.count_nonzero(out.numpy()):
            # Far from the limit; or no end in time was found, and the text is then cut there, as without a look ahead.
            self._state.mask(out, 0)
        self._took = time.perf_counter() - started
        return out[0]

    def _is_far(self) -> bool:
        """Whether the limit is so far that any way to go on leaves time to end; where an engine counts exactly, it says so.

        Far is four times the tokens that an end takes now, and 64 more; the next look is when an eighth of what lies between
        is used up, or of what is left where no end was found. Where the end is far behind the limit, there is none.
        """
        if self._compiled.counts_exactly:
            return False
        if self._left > self._look:
            return True
        needed = self._state.min_tokens_to_accept(self._left)
        if needed is not None:
            spare = self._left - 4 * needed - _NEAR
            self._look = self._left - 1 - spare // 8 if spare >= 0 else self._left
            return spare >= 0
        close, found = self._left <= _NEAR, self._state.min_tokens_to_accept(sys.maxsize)
        # A token brings an end one token nearer at best, and the limit, too: one that is far behind it stays there.
        never = found is not None and found > 2 * self._left
        self._look = 0 if never else self._left if close and found is not None else self._left - 1 - self._left // 8
        return never or not close

    def _settled(self) -> None:
        """Nobody else may be at the state, and what was filled for it no longer holds."""
        if self._ahead is not None:
            wait([self._ahead])
            self._ahead = None


class Forcing(Drafter):
    """Proposes nothing: what a constraint forces is forwarded ahead all the same."""

    kind: Literal["forcing"] = "forcing"
    schedule: Literal["constant", "heuristic", "dynamic"] = "constant"

    def start(self, host: DraftHost) -> DraftState:
        """It keeps nothing."""
        return _Nothing()


class _Nothing(DraftState):
    def propose(self, rows: Sequence[DraftRow], budgets: Sequence[int]) -> Sequence[Draft]:
        return [Draft()] * len(rows)


def constrain(scores: Tensor, plain: Tensor, rows: Sequence[RowConstraint | None]) -> tuple[Tensor, dict[int, str]]:
    """Scores with what is not legal at ``-inf``; positions without a constraint cost nothing.

    Args:
        scores: [P, V] from the strategy.
        plain: [P, V] the model's own logits, which count at positions where the strategy's plausible tokens are none of the
            legal ones.
        rows: [P] the constraint at each position, if any.

    Returns:
        [P, V], and why positions have no legal token.
    """
    failures: dict[int, str] = {}
    words: dict[int, Tensor] = {}
    for position, row in enumerate(rows):
        if row is None:
            continue
        try:
            mask = row.mask()
        except RowError as error:
            failures[position] = str(error)
            continue
        if mask is not None:
            words[position] = mask
    if not words:
        return scores, failures
    all_rows, masks = len(words) == len(scores), list(words.values())
    index = torch.tensor([*words], device=scores.device)
    own = legal_only(scores if all_rows else scores[index], masks)
    # The model's own logits are all there is.
    if scores is not plain and bool((empty := best_of_each(own) == -torch.inf).any()):
        own[empty] = legal_only(
            plain[index[empty]].to(own.dtype), [masks[place] for place in empty.nonzero().flatten().tolist()]
        )
    return (own if all_rows else scores.index_copy(0, index, own)), failures


def masks_of(sequences: Sequence[Any], confines: type[Exception]) -> tuple[list[Tensor | None], dict[int, str]]:
    """What may come next in each sequence, [ceil(V/32)] int32, ``None`` where all may; and why those fail that have nothing.

    Args:
        sequences: theirs.
        confines: what ends a sequence alone.
    """
    masks, failures = list[Tensor | None](), dict[int, str]()
    going = [own for own in sequences if own.constraint is not None and own.finish_reason is None]
    if len(going) > 1:
        for own in going:
            own.constraint.prefetch()
    for place, own in enumerate(sequences):
        masks.append(None)
        if own.constraint is not None and own.finish_reason is None:
            try:
                masks[place] = own.constraint.mask()
            except confines as error:
                failures[place] = reason(error)
    return masks, failures


def constrain_blindly(scores: Tensor, plain: Tensor, words: Tensor) -> Tensor:
    """As :func:`constrain`, without ever waiting for the device; a position without a legal token is all ``-inf``.

    Args:
        scores: [P, V] from the strategy.
        plain: [P, V] the model's own logits.
        words: [P, ceil(V/32)] int32, the legal tokens of each position.
    """
    legal = scores.clone()
    apply_bitmask(legal, words)
    if scores is plain:
        return legal
    own = plain.to(scores.dtype, copy=True)
    apply_bitmask(own, words)
    return torch.where(legal.amax(-1, keepdim=True) == -torch.inf, own, legal)


def leaves_a_core(device: torch.device) -> bool:
    """Whether a forward on this device leaves a core to fill masks on; a thread beside a full CPU would slow it down more."""
    return device.type != "cpu" or torch.get_num_threads() < (os.cpu_count() or 1)


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        max_workers=max(1, min(8, (os.cpu_count() or 2) // 2)), thread_name_prefix="decodekit-mask"
    )
