"""Contrast the final layer with the early layer that differs most from it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decodekit.core.constants import constant
from decodekit.core.errors import Refused
from decodekit.core.protocols import TokenStrategy
from decodekit.core.types import Need, Outputs
from decodekit.kernels.contrast import Divergence, contrast_layers


class Dola(TokenStrategy):
    """Decoding by contrasting layers.

    Chuang et al., 2023, arXiv:2309.03883, eq. 1-6: log p_N - log p_l*, where l* is the candidate layer whose distribution
    diverges most from the final one, on the tokens with p_N >= relative_top * max p_N. The layer is chosen for each row and
    position. ``low`` suits long reasoning, ``high`` short factual answers (section 3.1).

    Cost: one forward a token and one more head projection a candidate layer. Layers count as in ``output_hidden_states``:
    0 is the embedding, N the last. ``mode: compat`` gives the numbers of transformers 4.55's built-in DoLa on a batch of
    one (its divergence, and no softcap or scale on early logits).
    """

    cost: ClassVar[str] = "1 forward a token, 1 head projection a candidate layer"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.HIDDEN_STATES})

    kind: Literal["dola"] = "dola"
    layers: Literal["low", "high"] | tuple[int, ...] = Field(
        "low", description="candidate layers: the lower or upper half, or a list, 0 the embedding"
    )
    relative_top: float = Field(
        0.1, ge=0, le=1, description="tokens below this share of the top probability are dropped"
    )
    divergence: Divergence | None = Field(None, description="jsd (default in strict mode) or official (in compat mode)")
    early_norm: bool = Field(False, description="apply the final norm before early layers are read out")
    mode: Literal["strict", "compat"] = Field(
        "strict", description="strict is right row by row, compat as transformers 4.55"
    )

    def hidden_layers(self, config: Any) -> tuple[int, ...]:
        """The candidate layers of a model.

        Raises:
            Refused: a listed layer does not exist before the last.
        """
        count = config.num_hidden_layers
        if isinstance(self.layers, tuple):
            wrong = [layer for layer in self.layers if not 0 <= layer < count]
            if wrong or not self.layers:
                raise Refused(
                    f"dola layers {list(self.layers)} must be layers of 0 to {count - 1} of this model, got {wrong}"
                )
            return self.layers
        # With tied embeddings reading out the embedding gives the identity, which contrasts nothing.
        start = min(2, count - 1) if getattr(config, "tie_word_embeddings", False) else 0
        if self.layers == "low":
            stop = count // 2 if count <= 40 else 20
            return tuple(range(start, stop, 2)) or (start,)
        return tuple(range(count // 2 if count <= 40 else count - 20, count, 2))

    def score(self, outputs: Outputs) -> Tensor:
        """[P, V]: the log-ratio on the plausible tokens, -inf elsewhere."""
        main, official = outputs["main"], self.mode == "compat"
        early = main.early(norm=self.early_norm, finish=not official)  # [C, P, V]
        scores, chosen, divergence = contrast_layers(
            main.logits,
            early,
            share=self.relative_top,
            divergence=self.divergence or ("official" if official else "jsd"),
        )
        outputs.annotate(
            premature_layer=constant(main.layers, chosen.device, torch.int64)[chosen], divergence=divergence
        )
        return scores
