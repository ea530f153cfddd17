"""What the loop gives a drafter: models over caches of their own, and what the rules make of a distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from decodekit.cache.paged import PagedCache
from decodekit.core.drafts import DraftRow
from decodekit.core.errors import InputError
from decodekit.core.types import BranchOutputs, Rows
from decodekit.kernels import triton_runs
from decodekit.runtime.paged_session import PagedSession
from decodekit.runtime.pipeline import Pipeline

BLOCK_SIZE = 16


class CachedRunner:
    """A model over a paged cache of its own; see :class:`decodekit.core.drafts.Runner`.

    Args:
        model: the model.
        tokens: most tokens that all rows hold together.
        layers: hidden layers to keep.
        grows: take memory as rows grow, instead of all at once, which graphs need.
    """

    def __init__(self, model: Any, tokens: int, layers: Sequence[int], *, grows: bool = False) -> None:
        self.model = model
        cache = PagedCache(
            model.config,
            num_blocks=-(-tokens // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            device=model.device,
            prefix_cache=False,
            preallocate=not grows and triton_runs(model.device),
        )
        self._session = PagedSession(model, cache, layers=tuple(layers), rollbacks=True)
        self._rows: set[int] = set()
        self._optimized: ExitStack | None = None

    @torch.no_grad()
    def forward(
        self, tokens: Mapping[int, Sequence[int]], last: Mapping[int, int] | None = None
    ) -> dict[int, BranchOutputs]:
        """Forward the next tokens of rows (all of a prompt at first); the outputs at the ``last`` (1) positions of each."""
        fresh = [row for row in tokens if row not in self._rows]
        known = [row for row in tokens if row in self._rows]
        outputs: dict[int, BranchOutputs] = {}
        if fresh:
            self._leave()  # prompts are forwarded as ever, and the model may be another than before
            for row in fresh:
                self._session.expect(row, {"main": tokens[row]})
            outputs |= _by_row(self._session.prefill(fresh)["main"], fresh, [1] * len(fresh))
            self._rows.update(fresh)
        if known:
            counts = [1 if last is None else last[row] for row in known]
            if self._optimized is None:
                self._optimized = ExitStack()
                self._optimized.enter_context(self._session.optimized())
            stepped = self._session.step(known, [tokens[row] for row in known], counts)["main"]
            outputs |= _by_row(stepped, known, counts)
        return outputs

    def rollback(self, drop: Mapping[int, int]) -> None:
        """Take back the last tokens of rows."""
        self._session.rollback(drop)

    def fork(self, children: Mapping[int, int]) -> None:
        """Begin rows as copies of others; those whose parent is not here are left to be prefilled."""
        known = {row: parent for row, parent in children.items() if parent in self._rows}
        self._session.rearrange(known, ())
        self._rows |= known.keys()

    def release(self, rows: Sequence[int]) -> None:
        """Let go of rows."""
        gone = self._rows & set(rows)
        self._session.rearrange({}, gone)
        self._rows -= gone

    def close(self) -> None:
        """Give all blocks back."""
        self._leave()
        self._session.close()
        self._session.cache.free()

    def _leave(self) -> None:
        """End what makes steps fast."""
        if self._optimized is not None:
            self._optimized.close()
            self._optimized = None


def _by_row(outputs: BranchOutputs, rows: Sequence[int], counts: Sequence[int]) -> dict[int, BranchOutputs]:
    parts = torch.arange(sum(counts), device=outputs.logits.device).split(list(counts))
    return {row: outputs.select(part) for row, part in zip(rows, parts, strict=True)}


class Host:
    """What a drafter is given; see :class:`decodekit.core.drafts.DraftHost`.

    Args:
        model: the target.
        tokenizer: its tokenizer, or ``None``.
        models: other models by name, alone or with their tokenizer.
        pipeline: the target's rules.
        tokens: most tokens that all rows hold together.
        device: where rules run.
        grows: rows come and go, and seldom hold as many: memory is taken as they grow.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        models: Mapping[str, Any],
        pipeline: Pipeline,
        tokens: int,
        device: torch.device,
        *,
        grows: bool = False,
    ) -> None:
        self._grows = grows
        self.model, self.tokenizer = model, tokenizer
        self.sample = pipeline.sample
        self.vocab: int = model.get_output_embeddings().weight.shape[0]
        self._models, self._pipeline, self._tokens, self._device = models, pipeline, tokens, device
        self._runners: list[CachedRunner] = []

    def bound(self, name: str) -> tuple[Any, Any]:
        """The model of this name, and its tokenizer; ``None`` where it came without."""
        if name not in self._models:
            raise InputError(
                f"the drafter needs a model called {name!r}; give decoder.bind(models={{{name!r}: load_model(...)}})"
            )
        given = self._models[name]
        return given if isinstance(given, tuple) else (given, None)

    def runner(self, model: Any, *, layers: Sequence[int] = (), stretch: int = 1) -> CachedRunner:
        """Another model over a cache of its own."""
        runner = CachedRunner(model, self._tokens * stretch, layers, grows=self._grows)
        self._runners.append(runner)
        return runner

    def probabilities(self, rows: Sequence[DraftRow], ahead: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """[R, V] logits of the token after each row and the tokens drafted for it, as the target's rules would shape them."""
        histories = [[*row.ids, *more] for row, more in zip(rows, ahead, strict=True)]
        width = max(map(len, histories))
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in histories], device=self._device)
        view = Rows(
            tokens=padded,
            lengths=torch.tensor([len(ids) for ids in histories], device=self._device),
            prompt_lengths=torch.tensor([len(row.prompt_ids) for row in rows], device=self._device),
            requests=[row.request for row in rows],
            streams=[row.stream for row in rows],
            eos=self._pipeline.eos,
        )
        shaped = self._pipeline.shape(view, logits)
        return shaped.softmax(-1, dtype=torch.promote_types(shaped.dtype, torch.float32))

    def close(self) -> None:
        """The call is over: give back what the drafter's models hold."""
        for runner in self._runners:
            runner.close()
