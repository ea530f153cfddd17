"""Push the prediction away from what the model says without the prompt, or after a negative prompt."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from decodekit.core.protocols import TokenStrategy
from decodekit.core.types import Branch, Need, Outputs, Request
from decodekit.kernels.contrast import contrast


class ClassifierFree(TokenStrategy):
    """Classifier-free guidance.

    Sanchez et al., 2023, arXiv:2306.17806, eq. 7 and 8: u + guidance_scale (c - u), where c are the log-probabilities after
    the prompt and u those after the negative prompt; without one, u begins at the last token of the prompt. A negative
    prompt is given as text (put through the chat template as prompts are) or as token ids: as an option, in
    ``dk_inputs=[{"negative_prompt": ...}, ...]``, or as ``generate``'s own ``guidance_scale`` and ``negative_prompt_ids``,
    which win over the recipe.

    Helps a model to keep to an instruction, a style or a system prompt that it tends to forget. Large scales repeat the
    prompt and cost fluency; a negative prompt of another form than the prompt (length, language) pushes away the form too.
    Cost: two cached branches a row, one batched forward a token.
    """

    cost: ClassVar[str] = "2 cached branches a row, 1 batched forward a token"

    kind: Literal["cfg"] = "cfg"
    guidance_scale: float = Field(
        1.5, ge=0, description="1 is plain decoding, 0 decodes after the negative prompt alone"
    )
    negative_prompt: str | None = Field(None, description="of prompts that bring none of their own")

    def branches(self, request: Request) -> tuple[Branch, ...]:
        """The prompt, and the negative one.

        Raises:
            InputError: the negative prompt is empty, or is a text and there is no tokenizer.
        """
        negative = request.inputs.get(Need.NEGATIVE_PROMPT, self.negative_prompt)
        own = request.prompt_ids[-1:]
        ids = own if negative is None else request.prompt_of(negative, Need.NEGATIVE_PROMPT, self.kind)
        return Branch("main", request.prompt_ids), Branch("negative", ids)

    def score(self, outputs: Outputs) -> Tensor:
        """[P, V]; a token that the model excludes stays excluded."""
        return contrast(outputs["main"].logits, outputs["negative"].logits, self.guidance_scale, "guided")
