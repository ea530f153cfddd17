"""Move the final logits towards the distribution that the early layers point at."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit import Need, Outputs, Refused, TokenStrategy


class Sled(TokenStrategy):
    """Self logits evolution decoding.

    Zhang et al., 2024, arXiv:2411.02433, Algorithm 1, on the top ``evolution_scale`` tokens, ``-inf`` elsewhere:

    - For each early layer n and token i: m = max(0, cos(z_n - z_N, p_n - onehot_i))^2, how well the change from layer n to the
      last agrees with a step towards token i.
    - The latent distribution is the sum of m over the layers, normalized over the tokens.
    - The logits take one step of gradient descent on KL(latent, p): z_N - evolution_rate (p_N - latent).

    A position where no layer points at any of these tokens keeps its logits. Made for facts: questions with a short answer,
    multiple choice. As with DoLa the gain shrinks on small models, whose early layers say little when read with the last
    layer's head, and it does not help open-ended text. Cost: one forward a token and one more head projection a layer.
    """

    cost: ClassVar[str] = "1 forward a token, 1 head projection a layer"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.HIDDEN_STATES})

    kind: Literal["sled"] = "sled"
    layers: tuple[int, ...] | None = Field(
        None, description="early layers, 0 the embedding; all before the last if left out"
    )
    evolution_rate: float = Field(2.0, ge=0, description="length of the step; 0 is plain decoding among the top tokens")
    evolution_scale: int = Field(10, ge=1, description="how many top tokens take part; the others are dropped")

    def hidden_layers(self, config: Any) -> tuple[int, ...]:
        """The early layers.

        Raises:
            Refused: a listed layer does not exist before the last.
        """
        count = config.num_hidden_layers
        layers = tuple(range(count)) if self.layers is None else self.layers
        if not layers or not all(0 <= layer < count for layer in layers):
            raise Refused(f"sled layers {list(layers)} must be layers of 0 to {count - 1} of this model")
        return layers

    def score(self, outputs: Outputs) -> Tensor:
        """[P, V]: the evolved logits of the top tokens, -inf elsewhere."""
        main = outputs["main"]
        final = main.logits
        values, top = final.topk(min(self.evolution_scale, final.shape[-1]), dim=-1)  # [P, k]
        evidence = sum(self._agreement(main, layer, top) for layer in main.layers)  # [P, k]
        total = evidence.sum(-1, keepdim=True)
        share = final.softmax(-1).gather(-1, top)
        # Without any evidence there is no latent distribution to move to.
        evolved = torch.where(total > 0, values - self.evolution_rate * (share - evidence / total), values)
        return torch.full_like(final, -math.inf).scatter(-1, top, evolved)

    def _agreement(self, main: Any, layer: int, top: Tensor) -> Tensor:
        """[P, k]: m of every top token."""
        early = main.readout(main.hidden(layer))  # [P, V]
        change, p = early - main.logits, early.softmax(-1)
        change_top, p_top = change.gather(-1, top), p.gather(-1, top)
        # cos(change, p - onehot) without forming [P, k, V].
        dot = (change * p).sum(-1, keepdim=True) - change_top
        norm = (p.square().sum(-1, keepdim=True) - 2 * p_top + 1).clamp(min=0).sqrt() * change.norm(
            dim=-1, keepdim=True
        )
        return (dot / norm.clamp(min=1e-8)).clamp(min=0).square()
