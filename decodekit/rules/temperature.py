"""Temperature: divide the logits by t before sampling."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from decodekit.core.protocols import Rule
from decodekit.core.types import Rows


class Temperature(Rule):
    """Sharpen (t < 1) or flatten (t > 1) the distribution that is sampled from.

    Ackley, Hinton and Sejnowski, 1985, "A learning algorithm for Boltzmann machines": p ~ exp(z / t). Greedy decoding
    is not a temperature of 0 but ``do_sample: false``. Cost: one pass over the logits.
    """

    cost: ClassVar[str] = "O(V)"
    sampling_only: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    kind: Literal["temperature"] = "temperature"
    t: float = Field(
        description="logits are divided by it; 1 changes nothing",
        allow_inf_nan=False,
        json_schema_extra={"exclusiveMinimum": 0},
    )

    @field_validator("t")
    @classmethod
    def _positive(cls, t: float) -> float:
        if t <= 0:
            raise ValueError(f"t must be above 0, got {t:g}; for greedy decoding set generation: {{do_sample: false}}")
        return t

    def as_filter(self) -> tuple[Literal["temperature"], float]:
        """See the base."""
        return "temperature", self.t

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        if self.t == 1:
            return logits
        wide = torch.promote_types(logits.dtype, torch.float32)
        peak = logits.amax(-1, keepdim=True).to(wide)
        # Only differences matter: where a small t would overflow, the peak is moved to 0.
        overflows = peak.isfinite() & ((peak / self.t).abs() > torch.finfo(logits.dtype).max)
        return ((logits.to(wide) - peak.where(overflows, 0.0)) / self.t).to(logits.dtype)
