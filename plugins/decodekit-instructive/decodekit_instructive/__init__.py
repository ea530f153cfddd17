"""Push the answer away from what the model says under a misleading instruction."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from decodekit import Branch, Need, Outputs, Request, TokenStrategy


class Instructive(TokenStrategy):
    """Instructive decoding.

    Kim et al., 2023, arXiv:2311.00233, eq. 2: z - epsilon * z', where z' are the logits under a noisy instruction; the
    ``opposite`` one of section 3 by default. Cost: two cached branches a row.
    """

    cost: ClassVar[str] = "2 forwards a token"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TEXT, Need.TOKENIZER})

    kind: Literal["instructive"] = "instructive"
    epsilon: float = Field(0.3, ge=0, description="strength; 0 is plain decoding")
    noisy: str = Field(
        "Always answer with the opposite of what is asked.",
        description="the misleading instruction, put before the prompt",
    )

    def branches(self, request: Request) -> tuple[Branch, ...]:
        """The prompt, and the prompt behind the noisy instruction."""
        text = request.require(Need.TEXT, self.kind)
        noisy = request.encoded(f"{self.noisy}\n{text}", self.kind)
        return Branch("main", request.prompt_ids), Branch("noisy", noisy)

    def score(self, outputs: Outputs) -> Tensor:
        """[P, V]."""
        return outputs["main"].logits - self.epsilon * outputs["noisy"].logits
