"""From scores to tokens: the chain of rules, the invariant after it, and the pick.

After every chain each row must have a finite maximum: no NaN, no +inf, at least one legal token. A row that has none is
handled by the named fallback, for that row alone. A rule that raises ``RowError`` fails the rows for which it does so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from decodekit.core.errors import DecodekitError, PluginError, RowError
from decodekit.core.protocols import Rule
from decodekit.core.random import TOKEN_LANE, inverse_cdf
from decodekit.core.types import Request, Rows, draw
from decodekit.kernels.sample import sample
from decodekit.kernels.top_token import top_token
from decodekit.runtime.guard import guarded

Fallback = Literal["error", "relax", "eos", "raw"]
Step = Callable[[Rows, Tensor], Tensor]

_FILTERS = ("temperature", "top_k", "top_p", "min_p")
"""What the ``sample`` kernel does, in this order."""

LANES_PER_RULE = 16
"""Random lanes that a rule may use; lane 0 picks the token."""


@dataclass
class Picked:
    """What the pipeline decided at each position.

    Attributes:
        tokens: [P] int64.
        final: [P, V] logits after all rules.
        failures: a position, why it cannot go on.
        stages: (name, [P, V]) after the strategy and after each rule; only when asked for.
    """

    tokens: Tensor
    final: Tensor
    failures: dict[int, str] = field(default_factory=dict)
    stages: list[tuple[str, Tensor]] = field(default_factory=list)


class Pipeline:
    """The rules of one call, in order.

    Args:
        steps: (name, callable) pairs; a callable is a ``Rule`` or works like one.
        sample: draw the token; otherwise take the most likely one.
        fallback: what becomes of a row that its rules left without a token.
        eos: ids that end a sequence, for the ``eos`` fallback.

    Attributes:
        stateful: the steps that keep a state for each row.
    """

    def __init__(
        self,
        steps: Sequence[tuple[str, Step]],
        *,
        sample: bool,
        fallback: Fallback = "error",
        eos: tuple[int, ...] = (),
    ) -> None:
        self.steps = tuple(steps)
        self.sample = sample
        self.fallback = fallback
        self.eos = eos
        self._made: dict[Any, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self.stateful = [
            index
            for index, (_, step) in enumerate(self.steps)
            if isinstance(step, Rule) and type(step).init_state is not Rule.init_state
        ]

    def initial_states(self, request: Request) -> list[Any]:
        """The state of every step at the start of a row.

        Raises:
            InputError: a rule was not given what it needs.
        """
        states = list[Any]()
        for _, step in self.steps:
            if not isinstance(step, Rule):
                states.append(None)
                continue
            with guarded(step, "init_state"):
                states.append(step.init_state(request))
        return states

    def commit(self, states: list[Any], token: int, logits: Tensor) -> None:
        """Replace the states of a row after a token was chosen from ``logits`` [V]."""
        for index in self.stateful:
            rule: Any = self.steps[index][1]
            with guarded(rule, "commit"):
                states[index] = rule.commit(states[index], token, logits)

    def __call__(self, rows: Rows, scores: Tensor, states: Sequence[Sequence[Any]], *, record: bool = False) -> Picked:
        """Pick one token a position.

        Args:
            rows: what is known about the positions.
            scores: [P, V] from the strategy.
            states: [steps][P] the state of each rule at each position.
            record: keep the logits after every rule.
        """
        logits, stages = scores, [("scores", scores)]
        failures: dict[int, str] = {}
        for index, (name, _) in enumerate(self.steps):
            try:
                logits = self._apply(index, rows, logits, states)
            except RowError:
                logits = self._apply_one_by_one(index, rows, logits, states, failures)
            stages.append((name, logits))
        top, tokens = top_token(logits)
        broken = ~torch.isfinite(top)
        if bool(broken.any()):
            logits = logits.clone()
            for position in broken.nonzero().flatten().tolist():
                row = failures.get(position) or self._rescue(position, rows, stages, states)
                if isinstance(row, str):
                    failures[position] = row
                    # Any legal row will do: what is picked here is thrown away.
                    row = torch.zeros_like(logits[position])
                logits[position] = row
            tokens = logits.argmax(-1)
        if self.sample:
            probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
            tokens = inverse_cdf(probabilities, draw(rows.streams, rows.positions, TOKEN_LANE))
        return Picked(tokens, logits, failures, stages if record else [])

    def why_not_captured(self) -> str | None:
        """Why a graph cannot hold the steps; ``None``: it can, as far as they tell."""
        for index, (name, step) in enumerate(self.steps):
            if index in self.stateful:
                return f"rule {name!r} keeps a state"
            if not getattr(step, "capturable", False):
                return f"rule {name!r} is not capturable"
        return None

    def pick_blindly(
        self, rows: Rows, scores: Tensor, seeds: Tensor, counters: Tensor, logprobs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Pick one token a position without ever waiting for the device; no rule may keep a state.

        Args:
            rows: what is known about the positions.
            scores: [P, V] from the strategy.
            seeds: [P] int64, Philox keys of the draws.
            counters: [P, 4] int32, Philox counters.
            logprobs: [P] floating, filled with the tokens' log-probabilities under the final logits.

        Returns:
            [P] tokens, and [P] bool: where no token is to be had, so that only a call can tell what becomes of the row.
        """
        logits, filters = scores, self._last_filters() if self.sample else {}
        for index in range(len(self.steps) - len(filters)):
            logits = self._apply(index, rows, logits, [()] * len(self.steps))
        if self.sample:
            broken = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
            options = self._options(filters, len(logits), logits.shape[1], logits.device)
            return sample(logits, *options, seeds, counters, logprobs, broken), broken
        top, tokens = top_token(logits)
        broken = ~torch.isfinite(top)
        if logprobs is not None:
            logprobs.copy_(top - logits.logsumexp(-1))
        return torch.where(broken, 0, tokens), broken

    def _options(
        self, filters: Mapping[str, float], positions: int, vocab_size: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the ``sample`` kernel is told of the filters, [P] each; kept, as graphs go on reading it."""

        def each(name: str, otherwise: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((positions,), filters.get(name, otherwise), dtype=dtype, device=device)

        key = positions, vocab_size, device
        if key not in self._made:
            top_k = each("top_k", vocab_size, torch.int32)
            self._made[key] = each("temperature", 1.0), top_k, each("top_p", 1.0), each("min_p", 0.0)
        return self._made[key]

    def _last_filters(self) -> dict[str, float]:
        """The steps at the end that the ``sample`` kernel does by itself, in its order."""
        found: dict[str, float] = {}
        order = [*_FILTERS]
        for _, step in reversed(self.steps):
            own = step.as_filter() if isinstance(step, Rule) else None
            if own is None or own[0] not in order:
                break
            order = order[: order.index(own[0])]
            found[own[0]] = own[1]
        return found

    def shape(self, rows: Rows, logits: Tensor) -> Tensor:
        """[P, V] logits as the steps make them that keep no state; a position that they leave nothing keeps what it had."""
        given = logits
        for index, (_, step) in enumerate(self.steps):
            own = isinstance(step, Rule) and index not in self.stateful
            if own or getattr(step, "stateless", False):
                logits = self._apply(index, rows, logits, [()] * len(self.steps))
        return torch.where(torch.isfinite(logits.amax(-1, keepdim=True)), logits, given)

    def _apply(self, index: int, rows: Rows, logits: Tensor, states: Sequence[Sequence[Any]]) -> Tensor:
        name, step = self.steps[index]
        own = dataclasses.replace(rows, states=states[index], lane=1 + LANES_PER_RULE * index)
        version = logits._version
        try:
            result = step(own, logits)
        except DecodekitError:
            raise
        except Exception as error:
            raise PluginError(f"rule {name!r} failed: {type(error).__name__}: {error}") from error
        if logits._version != version:
            raise PluginError(f"rule {name!r} edited the logits it was given, which others share; return a new tensor")
        if not isinstance(result, Tensor) or result.shape != logits.shape or not result.is_floating_point():
            given = f"{tuple(result.shape)} {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
            raise PluginError(f"rule {name!r} returned {given}; expected {tuple(logits.shape)} {logits.dtype}")
        return result

    def _apply_one_by_one(
        self,
        index: int,
        rows: Rows,
        logits: Tensor,
        states: Sequence[Sequence[Any]],
        failures: dict[int, str],
    ) -> Tensor:
        """A step on each position alone, to find those that it fails; they keep their logits and join ``failures``."""
        parts = []
        for position in range(len(rows)):
            part = logits[position : position + 1]
            try:
                part = self._alone(index, position, rows, part, states)
            except RowError as error:
                failures.setdefault(position, f"rule {self.steps[index][0]!r}: {error}")
            parts.append(part)
        return torch.cat(parts)

    def _alone(self, index: int, position: int, rows: Rows, logits: Tensor, states: Sequence[Sequence[Any]]) -> Tensor:
        """A step on the logits [1, V] of one position."""
        return self._apply(index, select(rows, [position]), logits, [[column[position]] for column in states])

    def _rescue(
        self,
        position: int,
        rows: Rows,
        stages: Sequence[tuple[str, Tensor]],
        states: Sequence[Sequence[Any]],
    ) -> Tensor | str:
        """The logits [V] that the fallback gives a position, or why it cannot go on.

        Args:
            position: the position.
            rows: all positions.
            stages: (name, [P, V]) after the strategy and after each rule.
            states: as in the call.
        """
        scores = stages[0][1][position]
        if not torch.isfinite(scores.max()):
            found = "NaN" if bool(scores.isnan().any()) else "no finite value" if scores.max() < 0 else "infinity"
            return f"the scores of the next token hold {found}: the model or the strategy is broken for this prompt"
        broken = next(index for index, (_, logits) in enumerate(stages) if not torch.isfinite(logits[position].max()))
        if self.fallback == "relax":
            # Only what broke the row is left out: the rules behind it still hold.
            logits = stages[broken - 1][1][position : position + 1]
            for index in range(broken, len(self.steps)):
                result = self._alone(index, position, rows, logits, states)
                logits = result if torch.isfinite(result.max()) else logits
            return logits[0]
        if self.fallback == "raw":
            return scores
        if self.fallback == "eos" and self.eos:
            ended = torch.full_like(scores, -math.inf)
            ended[list(self.eos)] = 0.0
            return ended
        why = "no EOS id is known for fallback: eos" if self.fallback == "eos" else "or set fallback: relax | eos | raw"
        name, logits = stages[broken]
        if bool((logits[position] != -math.inf).any()):
            return f"rule {name!r} made NaN or infinity of the logits; mend it, {why}"
        return f"rule {name!r} left no token to choose from; loosen it, {why}"


def select(rows: Rows, positions: Sequence[int]) -> Rows:
    """The given positions of ``rows``, in this order."""
    index = torch.tensor(positions, device=rows.tokens.device)
    return dataclasses.replace(
        rows,
        tokens=rows.tokens[index],
        lengths=rows.lengths[index],
        prompt_lengths=rows.prompt_lengths[index],
        requests=[rows.requests[position] for position in positions],
        streams=[rows.streams[position] for position in positions],
        states=[rows.states[position] for position in positions] if rows.states else (),
    )
