"""A model and the cached branches that it runs for the sequences of a call: prompts in once, then the next tokens.

``DynamicSession`` keeps transformers' own cache (rectangular, left-padded, rows stay until all end);
:class:`decodekit.runtime.paged_session.PagedSession` keeps blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from decodekit.core import compat
from decodekit.core.errors import Refused
from decodekit.core.few_rows import few_rows
from decodekit.core.heads import Readout
from decodekit.core.types import BranchOutputs
from decodekit.runtime.capture import GraphStats
from decodekit.runtime.forward import Stepper

Ids = Sequence[int]


class Session(ABC):
    """What the loop needs of a model.

    Args:
        model: the model.
        layers: hidden layers of the ``main`` branch to keep.

    Attributes:
        layers: hidden layers of the ``main`` branch that are kept.
        forwarded: a row, its tokens that went through the model, all branches together.
        raw: what the model returned last.
        prompt_hidden: a row, its kept hidden layers [T, H] over the prompt of its main branch, where these are kept.
    """

    def __init__(self, model: Any, layers: tuple[int, ...]) -> None:
        self.model = model
        self.forwarded: Counter[int] = Counter()
        self.raw: Any = None
        self.prompt_hidden: dict[int, dict[int, Tensor]] = {}
        self._head_checked = False
        self.keep_layers(layers)

    def keep_layers(self, layers: tuple[int, ...]) -> None:
        """From the next forward on, keep these hidden layers of the ``main`` branch."""
        self.layers = layers
        self._readout = Readout(self.model) if layers else None

    @property
    @abstractmethod
    def cache(self) -> Any:
        """The transformers Cache of the main branch, or ``None``."""

    @property
    def replayed(self) -> GraphStats:
        """What single steps took from graphs."""
        return GraphStats()

    @property
    def steady(self) -> bool:
        """Whether the last step took as long as others like it will."""
        return True

    @abstractmethod
    def branches(self, row: int) -> tuple[str, ...]:
        """The branches that a row has here."""

    @abstractmethod
    def feed(self, rows: Sequence[int], budget: int | None = None) -> set[int]:
        """Forward what is missing of the prompts of these rows, in this order.

        Args:
            rows: [P].
            budget: most tokens to forward; ``None`` for all.

        Returns:
            those of the rows whose prompts are through.
        """

    @abstractmethod
    def first(self, rows: Sequence[int]) -> dict[str, BranchOutputs]:
        """The outputs at the last positions of prompts that are through, for each branch [P] of the rows that have it; once."""

    def prefill(self, rows: Sequence[int]) -> dict[str, BranchOutputs]:
        """Forward the prompts of these rows, [P]; for each branch the outputs at their last positions."""
        self.feed(rows)
        return self.first(rows)

    @abstractmethod
    def step(self, rows: Sequence[int], tokens: Sequence[Ids], last: Ids) -> dict[str, BranchOutputs]:
        """Forward the next tokens of each of these rows; for each branch the outputs at the ``last`` positions of every row.

        Args:
            rows: [R].
            tokens: [R] at least one each.
            last: [R] how many of a row's last positions.
        """

    def advance(
        self, rows: Sequence[int], tokens: Sequence[Ids], last: Ids, feeding: Sequence[int], budget: int | None
    ) -> tuple[dict[str, BranchOutputs], set[int]]:
        """What :meth:`step` and :meth:`feed` do with these arguments, in one forward where rows need no pads."""
        return self.step(rows, tokens, last) if rows else {}, self.feed(feeding, budget) if feeding else set()

    def rollback(self, drop: Mapping[int, int]) -> None:
        """Take back the last tokens of rows; after every step of a session that was made for it, which may drop nothing."""
        raise TypeError("the rows of this session cannot go back")

    def rearrange(self, forks: Mapping[int, int], gone: Collection[int]) -> None:
        """Begin rows as forks of others (a new row, its parent), and let go of rows that are over."""
        if forks:
            raise TypeError("the rows of this session cannot fork")

    def close(self) -> None:  # noqa: B027  most sessions hold nothing
        """Give back what the rows hold."""

    @contextmanager
    def optimized(self) -> Iterator[None]:
        """A context in which one-token steps are fastest."""
        with compat.optimized(self.model), few_rows(self.model):
            yield

    def _keep(self, raw: Any, branch: str, last: int = 1, kept: Tensor | None = None) -> BranchOutputs:
        """The outputs at the last positions of every row of a forward, [rows * last, ...]; of a packed one, at [n] ``kept``."""
        self.raw = raw
        logits = raw.logits[:, -last:] if kept is None else raw.logits
        # A copy, so that the logits of a whole prompt are not kept alive by a view of their last row.
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        known = {layer: raw.hidden_states[layer] for layer in (self.layers if branch == "main" else ())}
        hidden = {layer: own[:, -last:].flatten(0, 1) if kept is None else own[0, kept] for layer, own in known.items()}
        return BranchOutputs(logits, hidden, self._readout)

    def _check_head(self, kept: Tensor | None = None) -> None:
        """A head with a scale or softcap that is not known here would skew every early layer: refuse it.

        The last entry of ``hidden_states`` is the normed state that the model's own head read.

        Args:
            kept: of a packed forward, [n] the places that it gave logits of.
        """
        if self._readout is None or self._head_checked:
            return
        logits, hidden = self.raw.logits, self.raw.hidden_states[-1]
        logits, hidden = (logits[:, -1], hidden[:, -1]) if kept is None else (logits[0], hidden[0, kept])
        if not len(logits):
            return
        self._head_checked = True
        expected = logits.to(torch.promote_types(logits.dtype, torch.float32))
        worst = (self._readout(hidden, norm=False, finish=True) - expected).abs().max().item()
        # NaN logits are a fault of their row, not of the head.
        if worst > 1e-2 * max(1.0, expected.abs().max().item()):
            raise Refused(
                f"the output head of {type(self.model).__name__} is not understood: logits read from its last hidden state "
                f"differ by {worst:.3g}, so hidden layers cannot be contrasted; use a strategy that needs no hidden states"
            )


class DynamicSession(Session):
    """Branches over transformers' caches.

    Args:
        model: the model.
        branches: a branch name, its inputs over all rows.
        layers: hidden layers of the ``main`` branch to keep.
        pad: id fed for rows that have ended.
    """

    def __init__(
        self, model: Any, branches: Mapping[str, compat.Prepared], *, layers: tuple[int, ...], pad: int
    ) -> None:
        super().__init__(model, layers)
        self._pad = pad
        self._lengths = [sum(row) for row in zip(*(prepared.lengths for prepared in branches.values()), strict=True)]
        self._steppers = {
            name: Stepper(model, prepared, hidden_states=bool(layers) and name == "main")
            for name, prepared in branches.items()
        }
        self._first: dict[str, BranchOutputs] = {}

    @property
    @override
    def cache(self) -> Any:
        return self._steppers["main"].cache if "main" in self._steppers else None

    @override
    def branches(self, row: int) -> tuple[str, ...]:
        return tuple(self._steppers)

    @override
    def feed(self, rows: Sequence[int], budget: int | None = None) -> set[int]:
        for row in rows:
            self.forwarded[row] += self._lengths[row]
        self._first = self._prefill(last=1)
        return set(rows)

    @override
    def first(self, rows: Sequence[int]) -> dict[str, BranchOutputs]:
        outputs, self._first = self._first, {}
        return {name: self._rows(own, rows) for name, own in outputs.items()}

    def read(self, tokens: Sequence[Ids]) -> dict[str, BranchOutputs]:
        """For each branch the outputs from which each of these tokens, [R] of any numbers, would follow its row's prompt.

        Those of the first row come first: [N, ...] of all tokens.
        """
        width = max(map(len, tokens))
        # Pads on the right are behind all that is read.
        fed = [[*ids[:-1], *[self._pad] * (width - len(ids))] for ids in tokens]
        for stepper in self._steppers.values():
            stepper.extend(torch.tensor(fed, dtype=torch.long, device=stepper.input_ids.device))
        outputs = self._prefill(last=width)
        wanted = [row * width + place for row, ids in enumerate(tokens) for place in range(len(ids))]
        if len(wanted) == width * len(tokens):
            return outputs
        return {name: own.select(torch.tensor(wanted, device=own.logits.device)) for name, own in outputs.items()}

    def _prefill(self, last: int) -> dict[str, BranchOutputs]:
        kept = {}
        for name, stepper in self._in_order():
            kept[name] = self._keep(stepper.prefill(last), name, last)
            if name == "main":
                self._check_head()
        return kept

    @override
    def step(self, rows: Sequence[int], tokens: Sequence[Ids], last: Ids) -> dict[str, BranchOutputs]:
        fed = [self._pad] * len(self._lengths)
        for row, ids in zip(rows, tokens, strict=True):
            [fed[row]] = ids  # a rectangular batch grows by one token
            self.forwarded[row] += len(self._steppers)
        kept = {}
        for name, stepper in self._in_order():
            kept[name] = self._keep(stepper.step(torch.tensor(fed, device=stepper.input_ids.device)), name)
        return {name: self._rows(outputs, rows) for name, outputs in kept.items()}

    def _in_order(self) -> list[tuple[str, Stepper]]:
        """The main branch comes last, so that ``raw`` is its."""
        return sorted(self._steppers.items(), key=lambda item: item[0] == "main")

    def _rows(self, outputs: BranchOutputs, rows: Sequence[int]) -> BranchOutputs:
        if len(rows) == len(self._lengths):
            return outputs
        return outputs.select(torch.tensor(rows, device=outputs.logits.device))
