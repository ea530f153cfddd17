"""A model and the cached branches that it runs for the sequences of a call: prompts in once, then the next tokens.

``DynamicSession`` keeps transformers' own cache (rectangular, left-padded, rows stay until all end); ``PagedSession`` keeps
blocks (ragged, equal prompts are prefilled once, rows come, fork and leave at any time).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from decodekit.cache.attention import check_config
from decodekit.cache.paged import PagedCache
from decodekit.cache.prefix import Prompt
from decodekit.core import compat
from decodekit.core.errors import Refused
from decodekit.core.few_rows import few_rows
from decodekit.core.heads import readout
from decodekit.core.types import BranchOutputs
from decodekit.kernels import triton_runs
from decodekit.runtime.forward import RaggedForward, Stepper

Ids = Sequence[int]


class Session(ABC):
    """What the loop needs of a model.

    Args:
        model: the model.
        layers: hidden layers of the ``main`` branch to keep.

    Attributes:
        forwarded: a row, its tokens that went through the model, all branches together.
        raw: what the model returned last.
        prompt_hidden: a row, its kept hidden layers [T, H] over the prompt of its main branch, where these are kept.
    """

    def __init__(self, model: Any, layers: tuple[int, ...]) -> None:
        self.model = model
        self.forwarded: Counter[int] = Counter()
        self.raw: Any = None
        self.prompt_hidden: dict[int, dict[int, Tensor]] = {}
        self._layers = layers
        self._readout = readout(model) if layers else None
        self._head_checked = False

    @property
    @abstractmethod
    def cache(self) -> Any:
        """The transformers Cache of the main branch, or ``None``."""

    @property
    @abstractmethod
    def branches(self) -> tuple[str, ...]:
        """The names of the branches that it runs."""

    @abstractmethod
    def prompt(self, branch: str, row: int) -> Ids:
        """The prompt that a branch of a row began with."""

    @abstractmethod
    def prefill(self, rows: Sequence[int]) -> dict[str, BranchOutputs]:
        """Forward the prompts of these rows, [P]; for each branch the outputs at their last positions."""

    @abstractmethod
    def step(self, rows: Sequence[int], tokens: Sequence[Ids], last: Ids) -> dict[str, BranchOutputs]:
        """Forward the next tokens of each of these rows; for each branch the outputs at the ``last`` positions of every row.

        Args:
            rows: [R].
            tokens: [R] at least one each.
            last: [R] how many of a row's last positions.
        """

    def rollback(self, drop: Mapping[int, int]) -> None:
        """Take back the last tokens of rows; after every step of a session that was made for it, which may drop nothing."""
        raise TypeError("the rows of this session cannot go back")

    def rearrange(self, forks: Mapping[int, int], gone: Collection[int]) -> None:
        """Begin rows as forks of others (a new row, its parent), and let go of rows that are over."""
        if forks:
            raise TypeError("the rows of this session cannot fork")

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
        if self._readout is None or self._head_checked:
            return
        self._head_checked = True
        expected = self.raw.logits[:, -1].to(outputs.logits.dtype)
        worst = (
            (self._readout(self.raw.hidden_states[-1][:, -1], norm=False, finish=True) - expected).abs().max().item()
        )
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
        self._pad, self._prepared = pad, dict(branches)
        self._lengths = [sum(row) for row in zip(*(prepared.lengths for prepared in branches.values()), strict=True)]
        self._steppers = {
            name: Stepper(model, prepared, hidden_states=bool(layers) and name == "main")
            for name, prepared in branches.items()
        }

    @property
    @override
    def cache(self) -> Any:
        return self._steppers["main"].cache if "main" in self._steppers else None

    @property
    @override
    def branches(self) -> tuple[str, ...]:
        return tuple(self._prepared)

    @override
    def prompt(self, branch: str, row: int) -> Ids:
        prepared = self._prepared[branch]
        ids: list[int] = prepared.input_ids[row, prepared.input_ids.shape[1] - prepared.lengths[row] :].tolist()
        return ids

    @override
    def prefill(self, rows: Sequence[int]) -> dict[str, BranchOutputs]:
        for row in rows:
            self.forwarded[row] += self._lengths[row]
        return {name: self._rows(outputs, rows) for name, outputs in self._prefill(last=1).items()}

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
                self._check_head(kept[name])
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


class Key(NamedTuple):
    """Which branch of which row owns a place in the cache."""

    branch: str
    row: int


class PagedSession(Session):
    """Branches over one paged cache: all rows and branches in one forward, equal prompts prefilled once.

    Args:
        model: the model.
        cache: its cache; rows that are in it are given up.
        branches: a branch name, the prompt of every row, without pads.
        layers: hidden layers of the ``main`` branch to keep.
        keep_prompt: keep those layers over whole prompts, as ``prompt_hidden``.
        rollbacks: rows will be rolled back: every step is followed by :meth:`rollback`.
    """

    def __init__(
        self,
        model: Any,
        cache: PagedCache,
        branches: Mapping[str, Sequence[Ids]],
        *,
        layers: tuple[int, ...],
        keep_prompt: bool = False,
        rollbacks: bool = False,
    ) -> None:
        super().__init__(model, layers)
        self._cache = cache
        self._prompts = {
            name: {row: tuple(own) for row, own in enumerate(prompts)} for name, prompts in branches.items()
        }
        self._forward = RaggedForward(model, cache, hidden_states=bool(layers))
        self._keep_prompt = keep_prompt
        self._direct = triton_runs(model.device) and self._reads_blocks()
        # Which (branch, row) each row of the cache belongs to.
        self._order: list[Key] = []
        # Tokens that a rollback went back over, to be forwarded before the next ones.
        self._again: dict[Key, list[int]] = {}
        self._rollbacks = rollbacks
        cache.abort()
        cache.release(range(len(cache.rows)))

    @property
    @override
    def cache(self) -> PagedCache:
        return self._cache

    @property
    @override
    def branches(self) -> tuple[str, ...]:
        return tuple(self._prompts)

    @override
    def prompt(self, branch: str, row: int) -> Ids:
        return self._prompts[branch][row]

    def expect(self, row: int, prompts: Mapping[str, Ids]) -> None:
        """A row more, to be prefilled: the prompt of each of its branches."""
        for name, prompt in prompts.items():
            self._prompts[name][row] = tuple(prompt)

    @override
    def prefill(self, rows: Sequence[int]) -> dict[str, BranchOutputs]:
        if self._rollbacks:
            self._cache.activate_past_recording()  # not before: only what has begun is closed
        keys = [Key(name, row) for name in self._prompts for row in rows]
        prompts = list(dict.fromkeys(self._prompts[name][row] for name, row in keys))
        held = len(self._order)
        # A prompt whose hidden states are read is computed whole: a key of its own shares no block with others.
        opened = [Prompt(prompt, extra=object()) if self._keep_prompt else Prompt(prompt) for prompt in prompts]
        places = dict(zip(prompts, self._cache.open(opened), strict=True))
        owners = [places[self._prompts[name][row]] for name, row in keys]
        payers = {place: key.row for key, place in zip(reversed(keys), reversed(owners), strict=True)}
        for place, row in payers.items():
            self.forwarded[row] += len(prompts[place - held]) - self._cache.rows[place].num_cached
        hidden: dict[int, dict[int, Tensor]] = {place: {} for place in places.values()}
        rest = {place: prompt[self._cache.rows[place].length :] for prompt, place in places.items()}
        outputs = self._advance(rest, dict.fromkeys(rest, 1), hidden if self._keep_prompt else None)
        if self._keep_prompt:
            self.prompt_hidden |= {
                key.row: hidden[own] for key, own in zip(keys, owners, strict=True) if key.branch == "main"
            }
        self._cache.fork([*range(held), *owners])
        # Gathering would copy what they share for each of them.
        self._direct |= len(prompts) < len(keys) and self._reads_blocks()
        self._order += keys
        return self._split(outputs, [owner - held for owner in owners], len(rows))

    @override
    def step(self, rows: Sequence[int], tokens: Sequence[Ids], last: Ids) -> dict[str, BranchOutputs]:
        place_of = {key: place for place, key in enumerate(self._order)}
        keys = [Key(name, row) for name in self._prompts for row in rows]
        fed = dict(zip(rows, tokens, strict=True))
        again = {place_of[key]: [*self._again.pop(key, ()), *fed[key.row]] for key in keys}
        for key in keys:
            self.forwarded[key.row] += len(again[place_of[key]])
        if all(len(ids) == 1 for ids in again.values()):
            outputs = self._keep(self._run(list(again), list(again.values())), "main")
            return self._split(outputs, range(len(again)), len(rows))
        wanted = dict(zip(rows, last, strict=True))
        outputs = self._advance(again, {place_of[key]: wanted[key.row] for key in keys})
        return self._split(outputs, range(len(outputs.logits)), sum(last))

    @override
    def rollback(self, drop: Mapping[int, int]) -> None:
        counts = [drop.get(key.row, 0) for key in self._order]
        known = [[*row.tokens] if count else [] for row, count in zip(self._cache.rows, counts, strict=True)]
        for key, ids, count, again in zip(self._order, known, counts, self._cache.rollback(counts), strict=True):
            if again:
                # Its states went back further than was asked for: these are forwarded with the next tokens.
                end = len(ids) - count
                self._again[key] = [*ids[end - again : end], *self._again.get(key, ())]

    @override
    def rearrange(self, forks: Mapping[int, int], gone: Collection[int]) -> None:
        if not forks and not gone:
            return
        place_of = {key: place for place, key in enumerate(self._order)}
        source = {key: key for key in self._order if key.row not in gone}
        source |= {Key(name, row): Key(name, parent) for name in self._prompts for row, parent in forks.items()}
        self._cache.fork([place_of[parent] for parent in source.values()])
        self._order = list(source)
        self._again = {key: self._again[parent] for key, parent in source.items() if parent in self._again}
        if len(forks) > len(set(forks.values())):
            self._direct |= self._reads_blocks()

    @override
    @contextmanager
    def optimized(self) -> Iterator[None]:
        with super().optimized(), few_rows(self.model):
            yield

    @override
    def close(self) -> None:
        self._cache.abort()  # an interrupt may have come between a step and its end
        self._cache.release(range(len(self._cache.rows)))
        if self._rollbacks:
            self._cache.deactivate_past_recording()
        self._order = []

    def _run(self, places: Sequence[int], tokens: Sequence[Ids], last: int = 1) -> Any:
        """Forward the next tokens of these places; rows that share much are attended where it lies, once."""
        if self._direct:
            try:
                return self._forward(places, tokens, last=last, direct=True)
            except Refused:
                self._direct = False
        return self._forward(places, tokens, last=last)

    def _advance(
        self, tokens: Mapping[int, Ids], last: Mapping[int, int], hidden: Mapping[int, dict[int, Tensor]] | None = None
    ) -> BranchOutputs:
        """Forward these tokens of places, however few of them a step may take.

        Args:
            tokens: a place, its next tokens.
            last: a place, how many of its last positions to give.
            hidden: filled with the kept layers at all positions of a place, if given.

        Returns:
            the outputs at the last positions of each place, in order.
        """
        parts: dict[int, list[BranchOutputs]] = {place: [] for place in tokens}
        waiting = dict(tokens)
        while waiting:
            chunks = {place: ids[: self._cache.max_query(place, len(ids))] for place, ids in waiting.items()}
            group = self._cache.together({place: len(ids) for place, ids in chunks.items()})
            # Of a chunk, those of the wanted positions that are not in later ones.
            wanted = {
                place: max(0, min(len(chunks[place]), last[place] - (len(waiting[place]) - len(chunks[place]))))
                for place in group
            }
            width = max(1, *wanted.values())
            outputs = self._keep(self._run(group, [chunks[place] for place in group], width), "main", width)
            self._check_head(outputs)
            for position, place in enumerate(group):
                if hidden is not None:
                    self._note(hidden[place], position, len(chunks[place]))
                if wanted[place]:
                    end = (position + 1) * width
                    index = torch.arange(end - wanted[place], end, device=outputs.logits.device)
                    whole = wanted[place] == len(outputs.logits)
                    parts[place].append(outputs if whole else outputs.select(index))
                waiting[place] = waiting[place][len(chunks[place]) :]
                if not waiting[place]:
                    del waiting[place]
        return BranchOutputs.concatenate([part for own in parts.values() for part in own])

    def _note(self, known: dict[int, Tensor], position: int, count: int) -> None:
        """Add the hidden states of the last ``count`` tokens at a position of the last forward."""
        for layer in self._layers:
            part = self.raw.hidden_states[layer][position, -count:]
            known[layer] = torch.cat([known[layer], part]) if layer in known else part

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
