"""Amplify what a context adds to the prediction, against what the model says without it."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from torch import Tensor

from decodekit.core.errors import InputError
from decodekit.core.protocols import TokenStrategy
from decodekit.core.types import Branch, Need, Outputs, Request, check_ids_or_text
from decodekit.kernels.contrast import contrast, layer_divergence


class ContextAware(TokenStrategy):
    """Context-aware decoding.

    Shi et al., 2023, arXiv:2305.14739, section 2.2: (1 + alpha) z(context, prompt) - alpha z(prompt). With ``adaptive``
    alpha is, for each row and position, the Jensen-Shannon divergence in nats of the two distributions (AdaCAD, Wang et al.,
    2024, arXiv:2409.07394, section 3).

    The context comes with each prompt: ``{"prompt": ..., "context": ...}`` or ``dk_inputs=[{"context": ...}, ...]``; the
    option ``context`` serves prompts that bring none. Two ways to write it:

    - The prompt holds the context (always so where ids are given to ``generate``): the main branch is the prompt as it is,
      the other one the same without the context, its chat template kept. A context may also be a run of the prompt's ids.
    - The prompt is the question alone: the main branch is ``template`` filled with both, the other one the prompt as it is.

    Helps where the context contradicts what the model believes (new facts, documents to be summarized). It does nothing good
    where they agree: there it only sharpens the distribution, and adaptive keeps closer to the model; nor where the context
    may be wrong. Cost: two cached branches a row, one batched forward a token.
    """

    cost: ClassVar[str] = "2 cached branches a row, 1 batched forward a token"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.CONTEXT, Need.TOKENIZER})

    kind: Literal["cad"] = "cad"
    alpha: float = Field(1.0, ge=0, description="how strongly the context is amplified; 0 is plain decoding")
    adaptive: bool = Field(False, description="take alpha from the divergence of the two distributions instead")
    context: str | None = Field(None, description="the context of prompts that bring none of their own")
    template: str = Field("{context}\n{prompt}", description="puts a context before a prompt that does not hold it")

    @field_validator("template")
    @classmethod
    def _has_places(cls, template: str) -> str:
        if missing := [place for place in ("{context}", "{prompt}") if place not in template]:
            raise ValueError(f"should hold {' and '.join(missing)}, got {template!r}")
        return template

    def branches(self, request: Request) -> tuple[Branch, ...]:
        """The prompt with the context, and without it.

        Raises:
            InputError: the context is missing or empty, or is neither in the prompt nor can be put before it.
        """
        context = request.inputs.get(Need.CONTEXT, self.context)
        if context is None:
            request.require(Need.CONTEXT, self.kind)
        check_ids_or_text(context, Need.CONTEXT, self.kind, request.prompt)
        main = request.prompt_ids
        if (without := request.without(context, self.kind)) is None:
            main, without = self._joined(context, request), main
        return Branch("main", main), Branch("without_context", without)

    def score(self, outputs: Outputs) -> Tensor:
        """[P, V] logits; a token that the model excludes stays excluded."""
        given, prior = outputs["main"].logits, outputs["without_context"].logits
        alpha: float | Tensor = self.alpha
        if self.adaptive:
            alpha = layer_divergence(given, prior.unsqueeze(0)).squeeze(0)  # [P]
            outputs.annotate(divergence=alpha)
        return contrast(given, prior, alpha)

    def _joined(self, context: Any, request: Request) -> tuple[int, ...]:
        if not isinstance(context, str):
            return (*context, *request.prompt_ids)
        text = request.inputs.get(Need.TEXT)
        if not isinstance(text, str) or context in text:
            raise InputError(
                f"{self.kind}: the context of prompt {request.prompt} does not occur in what its ids decode to; give it to the "
                "letter, as token ids, or beside the text of a prompt without it"
            )
        parts = {"context": context, "prompt": text}
        return request.encoded(re.sub(r"\{(context|prompt)\}", lambda place: parts[place[1]], self.template), self.kind)
