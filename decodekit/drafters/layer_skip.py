"""Propose what the model says without some of its layers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator

from decodekit.core.compat import text_config
from decodekit.core.draft_chains import ChainDrafts
from decodekit.core.drafts import DraftHost, DraftState
from decodekit.core.errors import Refused
from decodekit.core.protocols import Drafter
from decodekit.core.sublayers import decoder_layers, with_layers


class LayerSkip(Drafter):
    """Self-speculation: the target without some of its layers drafts, the whole target verifies.

    Zhang et al., 2023, arXiv:2309.08168 (``skip``, found by :func:`search`); early exit after the first layers, Elhoushi et
    al., 2024, arXiv:2404.16710 (``first``). Both skip whole decoder layers; attention and MLP are not told apart, and the
    layers that draft keep a cache of their own. Draws when sampling as ``draft_model`` does. Helps where the model was trained
    for early exits, or where a search finds layers that it hardly needs; small models seldom have any.

    Cost: one forward of the remaining layers a drafted token; no weights.
    """

    cost: ClassVar[str] = "1 forward of some of the layers a drafted token"
    cheap: ClassVar[bool] = False

    kind: Literal["layer_skip"] = "layer_skip"
    skip: tuple[int, ...] = Field((), description="decoder layers to leave out, 0 the first")
    first: int | None = Field(None, ge=1, description="keep so many first layers, then exit")
    schedule: Literal["constant", "heuristic", "dynamic"] = Field(
        "heuristic",
        description="length of drafts, as of every drafter; sampling draws from the layers except if dynamic",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.skip) == (self.first is not None):
            raise ValueError("give either skip, a list of layers to leave out, or first, how many to keep")
        return self

    def start(self, host: DraftHost) -> DraftState:
        """A cache for the remaining layers.

        Raises:
            Refused: the model has no such layers, or they depend on each other.
        """
        model = with_layers(host.model, self._kept(host.model))
        return ChainDrafts(host, host.runner(model), draws=host.sample and self.schedule != "dynamic")

    def _kept(self, model: Any) -> list[int]:
        count = text_config(model).num_hidden_layers
        kept = [layer for layer in range(self.first or count) if layer not in self.skip]
        if not 0 < len(kept) < count or kept[-1] >= count or max(self.skip, default=0) >= count:
            what = f"first: {self.first}" if self.first is not None else f"skip: {list(self.skip)}"
            raise Refused(
                f"drafter 'layer_skip': {what} leaves no part of {count} layers; name layers from 0 to {count - 1}"
            )
        return kept


@torch.no_grad()
def search(
    model: Any, sequences: Sequence[Sequence[int]], *, trials: int = 100, drafts: int = 4, seed: int = 0
) -> tuple[int, ...]:
    """Layers to skip, for ``skip``: those that promise the most tokens a second on sequences that the model has written.

    Zhang et al., 2023, arXiv:2309.08168, section 3.3, search the same space by Bayesian optimisation of measured seconds;
    here by hill climbing on (1 - a^(g+1)) / (1 - a) / (1 + g c), where a is how often the remaining layers agree with the
    model's most likely token, and c the share of layers that remain. Cost: one forward of the remaining layers over all
    sequences a trial.

    Args:
        model: the target.
        sequences: token ids, prompts with the model's own outputs; a few hundred tokens in all.
        trials: sets of layers to try.
        drafts: g, tokens of a draft.
        seed: of the order in which layers are tried.

    Raises:
        Refused: the model's layers depend on each other.
    """
    count = len(decoder_layers(model)[2])
    inputs = [torch.tensor([ids], device=model.device) for ids in sequences]
    expected = torch.cat([model(ids, use_cache=False).logits[0].argmax(-1) for ids in inputs])

    def gain(skip: frozenset[int]) -> float:
        shorter = with_layers(model, [layer for layer in range(count) if layer not in skip])
        found = torch.cat([shorter(ids, use_cache=False).logits[0].argmax(-1) for ids in inputs])
        agreed = (found == expected).double().mean().item()
        tokens = sum(agreed**place for place in range(drafts + 1))
        return tokens / (1 + drafts * (count - len(skip)) / count)

    generator = random.Random(seed)
    best = frozenset[int]()
    reached, tried = gain(best), {best}
    for _ in range(trials):
        # One layer changes sides, or two change places.
        changed = best ^ frozenset(generator.sample(range(count), generator.choice((1, 1, 2))))
        if changed in tried or not 0 < len(changed) < count:
            continue
        tried.add(changed)
        if (own := gain(changed)) > reached:
            best, reached = changed, own
    return tuple(sorted(best))
