"""The model's own distribution: the most likely token, or a draw with ``do_sample: true``."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from decodekit.core.protocols import TokenStrategy
from decodekit.core.types import Outputs


class Sample(TokenStrategy):
    """Plain decoding: greedy, or ancestral sampling with ``do_sample: true``.

    Cost: one forward a token.
    """

    cost: ClassVar[str] = "1 forward a token"

    kind: Literal["sample"] = "sample"

    def score(self, outputs: Outputs) -> Tensor:
        """[P, V]: the model's logits."""
        return outputs["main"].logits
