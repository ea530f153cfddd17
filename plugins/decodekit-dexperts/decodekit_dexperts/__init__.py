"""Steer a model by the difference between an expert and an anti-expert, such as a small model before and after tuning."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from decodekit import Branch, Outputs, Request, TokenStrategy
from decodekit.core.options import ModelName


class DExperts(TokenStrategy):
    """DExperts and proxy tuning.

    Liu et al., 2021, arXiv:2105.03023, eq. 2: z + alpha (z_expert - z_antiexpert). Proxy tuning (Liu et al., 2024,
    arXiv:2401.08565, eq. 1) is the same with alpha 1, a tuned small model as the expert and the untuned one as the anti-expert.
    The main model takes the place of the one that is left out: without an expert, it is pushed away from the anti-expert alone.

    Helps to give a large model a style, a domain or an instruction format that a small one of the same vocabulary was tuned
    for; it cannot add knowledge that neither has, and a large alpha hands the text over to the small models. Cost: one
    forward of each model a token.
    """

    cost: ClassVar[str] = "1 forward of each model a token"

    kind: Literal["dexperts"] = "dexperts"
    expert: ModelName | None = Field(None, description="model to steer towards; the main model if left out")
    antiexpert: ModelName | None = Field(None, description="model to steer away from; the main model if left out")
    alpha: float = Field(1.0, ge=0, description="strength; 0 is plain decoding")

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if self.expert is None and self.antiexpert is None:
            raise ValueError("neither expert nor antiexpert is given: name at least one model")
        return self

    def models(self) -> tuple[str, ...]:
        """The experts that are named."""
        return tuple(name for name in (self.expert, self.antiexpert) if name is not None)

    def branches(self, request: Request) -> tuple[Branch, ...]:
        """The prompt, on every model."""
        named = {"expert": self.expert, "antiexpert": self.antiexpert}
        others = (Branch(role, request.prompt_ids, model=name) for role, name in named.items() if name is not None)
        return Branch("main", request.prompt_ids), *others

    def score(self, outputs: Outputs) -> Tensor:
        """[P, V] logits."""
        main = outputs["main"].logits
        expert, antiexpert = (outputs[role].logits if role in outputs else main for role in ("expert", "antiexpert"))
        return main + self.alpha * (expert - antiexpert)
