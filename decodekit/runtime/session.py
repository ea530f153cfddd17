"""A model and the cached branches that it runs for the rows of a call: prompts in once, then one token a live row.

``DynamicSession`` keeps transformers' own cache (rectangular, left-padded, rows stay until all end); ``PagedSession`` keeps
blocks (ragged, equal prompts are prefilled once, rows leave as they end).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from typing_extensions import override

from decodekit.cache.attention import check_config
from decodekit.cache.paged import PagedCache
from decodekit.core import compat
from decodekit.core.errors import Refused
from decodekit.core.heads import readout
from decodekit.core.types import BranchOutputs
from decodekit.runtime.forward import RaggedForward, Stepper

Ids = Sequence[int]


class Session(ABC):
    """What the loop needs of a model.

    Args:
        model: the model.
        rows: rows of the call.
        layers: hidden layers of the ``main`` branch to keep.

    Attributes:
        forwarded: [R] tokens of each row that went through the model, all branches together.
        raw: what the model returned last.
    """

    def __init__(self, model: Any, rows: int, layers: tuple[int, ...]) -> None:
        self.model = model
        self.forwarded = [0] * rows
        self.raw: Any = None
        self._layers = layers
        self._readout = readout(model) if layers else None

    @property
    @abstractmethod
    def cache(self) -> Any:
        """The transformers Cache of the main branch, or ``None``."""

    @abstractmethod
    def prefill(self, rows: Sequence[int]) -> dict[str, BranchOutputs]:
        """Forward the prompts of these rows, [P]; for each branch the outputs at their last positions."""

    @abstractmethod
    def step(self, rows: Sequence[int], tokens: Ids) -> dict[str, BranchOutputs]:
        """Forward one more token of each of these rows, [P]; rows left out have ended."""

    def close(self) -> None:  # noqa: B027  most sessions hold nothing
        """Give back what the rows hold."""

    def optimized(self) -> AbstractContextManager[None]:
        """A context in which one-token steps are fastest."""
        return compat.optimized(self.model)

    def _keep(self, raw: Any, branch: str, last: int = 1) -> BranchOutputs:
        """The outputs at the last positions of every row of a forward, [rows * last, ...]."""
        self.raw = raw
        # A copy, so that the logits of a whole prompt are not kept alive by a view of their last row.
        logits = raw.logits[:, -last:].flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        layers = self._layers if branch == "main" else ()
        hidden = {layer: raw.hidden_states[layer][:, -last:].flatten(0, 1) for layer in layers}
        return BranchOutputs(logits, hidden, self._readout)

    def _check_head(self, outputs: BranchOutputs) -> None:
        """A head with a scale or softcap that is not known here would skew every early layer: refuse it.

        The last entry of ``hidden_states`` is the normed state that the model's own head read.
        """
        if self._readout is None:
            return
        expected = self.raw.logits[:, -1].to(outputs.logits.dtype)
        worst = (outputs.readout(self.raw.hidden_states[-1][:, -1]) - expected).abs().max().item()
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
        lengths = [prepared.lengths for prepared in branches.values()]
        super().__init__(model, len(lengths[0]), layers)
        self._pad, self._lengths = pad, [sum(row) for row in zip(*lengths, strict=True)]
        self._steppers = {
            name: Stepper(model, prepared, hidden_states=bool(layers) and name == "main")
            for name, prepared in branches.items()
        }

    @property
    @override
    def cache(self) -> Any:
        return self._steppers["main"].cache if "main" in self._steppers else None

    @override
    def prefill(self, rows: Sequence[int]) -> dict[str, BranchOutputs]:
        for row in rows:
            self.forwarded[row] += self._lengths[row]
        return {name: self._rows(outputs, rows) for name, outputs in self._prefill(last=1).items()}

    def read(self, tokens: Ids) -> dict[str, BranchOutputs]:
        """For each branch of the one row, the outputs from which each of these tokens would follow its prompt, [N, ...]."""
        for stepper in self._steppers.values():
            stepper.extend(torch.tensor([list(tokens[:-1])], dtype=torch.long, device=stepper.input_ids.device))
        return self._prefill(last=len(tokens))

    def _prefill(self, last: int) -> dict[str, BranchOutputs]:
        kept = {}
        for name, stepper in self._in_order():
            kept[name] = self._keep(stepper.prefill(last), name, last)
            if name == "main":
                self._check_head(kept[name])
        return kept

    @override
    def step(self, rows: Sequence[int], tokens: Ids) -> dict[str, BranchOutputs]:
        fed = [self._pad] * len(self.forwarded)
        for row, token in zip(rows, tokens, strict=True):
            fed[row] = token
            self.forwarded[row] += len(self._steppers)
        kept = {}
        for name, stepper in self._in_order():
            kept[name] = self._keep(stepper.step(torch.tensor(fed, device=stepper.input_ids.device)), name)
        return {name: self._rows(outputs, rows) for name, outputs in kept.items()}

    def _in_order(self) -> list[tuple[str, Stepper]]:
        """The main branch comes last, so that ``raw`` is its."""
        return sorted(self._steppers.items(), key=lambda item: item[0] == "main")

    def _rows(self, outputs: BranchOutputs, rows: Sequence[int]) -> BranchOutputs:
        if len(rows) == len(self.forwarded):
            return outputs
        return outputs.select(torch.tensor(rows, device=outputs.logits.device))


class PagedSession(Session):
    """Branches over one paged cache: all rows and branches in one forward, equal prompts prefilled once.

    Args:
        model: the model.
        cache: its cache; rows that are in it are given up.
        branches: a branch name, the prompt of every row, without pads.
        layers: hidden layers of the ``main`` branch to keep.
    """

    def __init__(
        self, model: Any, cache: PagedCache, branches: Mapping[str, Sequence[Ids]], *, layers: tuple[int, ...]
    ) -> None:
        super().__init__(model, len(next(iter(branches.values()))), layers)
        self._cache = cache
        self._prompts = {name: [tuple(prompt) for prompt in prompts] for name, prompts in branches.items()}
        self._forward = RaggedForward(model, cache, hidden_states=bool(layers))
        self._direct = False
        # Which (branch, row) each row of the cache belongs to.
        self._order: list[tuple[str, int]] = []

    @property
    @override
    def cache(self) -> PagedCache:
        return self._cache

    @override
    def prefill(self, rows: Sequence[int]) -> dict[str, BranchOutputs]:
        self._cache.release(range(len(self._cache.rows)))
        keys = [(name, row) for name in self._prompts for row in rows]
        prompts = list(dict.fromkeys(self._prompts[name][row] for name, row in keys))
        places = dict(zip(prompts, self._cache.open(prompts), strict=True))
        cached = [row.num_cached for row in self._cache.rows]
        outputs = self._prefill_open(prompts)
        owners = [places[self._prompts[name][row]] for name, row in keys]
        first = {place: row for (_, row), place in zip(reversed(keys), reversed(owners), strict=True)}
        for place, row in first.items():
            self.forwarded[row] += len(prompts[place]) - cached[place]
        self._cache.fork(owners)
        # Gathering would copy what they share for each of them.
        self._direct = len(prompts) < len(keys) and self._reads_blocks()
        self._order = keys
        return self._split(outputs, owners, len(rows))

    @override
    def step(self, rows: Sequence[int], tokens: Ids) -> dict[str, BranchOutputs]:
        live = dict(zip(rows, tokens, strict=True))
        ended = [place for place, (_, row) in enumerate(self._order) if row not in live]
        if ended:
            self._cache.release(ended)
            self._order = [key for key in self._order if key[1] in live]
        raw = self._forward_one([live[row] for _, row in self._order])
        for _, row in self._order:
            self.forwarded[row] += 1
        return self._split(self._keep(raw, "main"), range(len(self._order)), len(rows))

    @override
    def close(self) -> None:
        self._cache.release(range(len(self._cache.rows)))
        self._order = []

    def _forward_one(self, tokens: Ids) -> Any:
        """Forward one token of every row; rows that share much are attended where it lies, once."""
        rows, inputs = range(len(tokens)), [[token] for token in tokens]
        if self._direct:
            try:
                return self._forward(rows, inputs, direct=True)
            except Refused:
                self._direct = False
        return self._forward(rows, inputs)

    def _prefill_open(self, prompts: Sequence[Ids]) -> BranchOutputs:
        """Forward what the cache does not have of every open row; outputs at their last positions."""
        parts: dict[int, BranchOutputs] = {}
        waiting = dict(enumerate(prompts))
        while waiting:
            tokens = {}
            for row, prompt in waiting.items():
                start = self._cache.rows[row].length
                tokens[row] = prompt[start : start + self._cache.max_query(row, len(prompt) - start)]
            group = self._cache.together({row: len(ids) for row, ids in tokens.items()})
            outputs = self._keep(self._forward(group, [tokens[row] for row in group]), "main")
            if not parts:
                self._check_head(outputs)
            for place, row in enumerate(group):
                if self._cache.rows[row].length == len(waiting[row]):
                    parts[row] = outputs.select(torch.tensor([place], device=outputs.logits.device))
                    del waiting[row]
        return BranchOutputs.concatenate([parts[row] for row in range(len(prompts))])

    def _reads_blocks(self) -> bool:
        try:
            check_config(self.model.config)
        except Refused:
            return False
        return True

    def _split(self, outputs: BranchOutputs, places: Sequence[int], count: int) -> dict[str, BranchOutputs]:
        """The outputs by branch: ``places`` holds those of ``count`` rows a branch."""
        if len(self._prompts) == 1 and list(places) == list(range(len(outputs.logits))):
            return {next(iter(self._prompts)): outputs}
        index = torch.tensor(places, device=outputs.logits.device)
        parts = index.split(count)
        return {name: outputs.select(part) for name, part in zip(self._prompts, parts, strict=True)}
