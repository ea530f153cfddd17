"""Subtract what a weaker model, or the first layers of the same one, would say."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from decodekit.core.errors import Refused
from decodekit.core.options import ModelName
from decodekit.core.protocols import TokenStrategy
from decodekit.core.types import Branch, Outputs, Request
from decodekit.kernels.contrast import contrast


class FirstLayers(BaseModel):
    """An amateur that is the expert's own first layers, read out with its head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int = Field(ge=1, description="decoder layers of the amateur, fewer than the model has")
    early_norm: bool = Field(True, description="apply the final norm before the head")


class ContrastiveDecoding(TokenStrategy):
    """Contrastive decoding.

    On the tokens with p_expert >= alpha max p_expert, ``-inf`` elsewhere:

    - ``form: ratio``, Li et al., 2022, arXiv:2210.15097, eq. 2: log p_expert - beta log p_amateur, theirs with beta 1.
    - ``form: logits``, O'Brien and Lewis, 2023, arXiv:2309.09117, section 2: (1 + beta) z_expert - beta z_amateur.

    The amateur is another model of the same vocabulary, named by id or folder (or as ``Decoder.bind(models=...)`` calls it),
    or ``{layers: k}``, the first k layers of the model itself. Both are fed the same tokens, each from a cache of its own.

    Helps open-ended text of large models (Li et al.) and reasoning (O'Brien and Lewis) where the amateur is much smaller,
    of the same family. It does little for recall of facts, and harms where the amateur is about as good as the expert or
    of another kind (a base model under an instructed one). Cost: one forward of each a token; with layers, one more head
    projection.
    """

    cost: ClassVar[str] = "1 forward and 1 of the amateur a token; with layers, 1 head projection"

    kind: Literal["contrastive_decoding"] = "contrastive_decoding"
    amateur: ModelName | FirstLayers = Field(description="a model, or {layers: k} for the first k layers of this one")
    alpha: float = Field(0.1, ge=0, le=1, description="tokens below this share of the top probability are dropped")
    beta: float | None = Field(
        None,
        ge=0,
        description="weight of the amateur, 0 takes the expert alone; 0.5 for logits, 1 for ratio if left out",
    )
    amateur_temperature: float | None = Field(
        None,
        gt=0,
        description="divides the amateur's logits; 1 for logits, 0.5 for ratio if left out, as in the papers",
    )
    form: Literal["logits", "ratio"] = Field("logits", description="of logits or of log-probabilities, see the papers")

    def models(self) -> tuple[str, ...]:
        return (self.amateur,) if isinstance(self.amateur, str) else ()

    def branches(self, request: Request) -> tuple[Branch, ...]:
        main = Branch("main", request.prompt_ids)
        return (main, *(Branch("amateur", request.prompt_ids, model=name) for name in self.models()))

    def hidden_layers(self, config: Any) -> tuple[int, ...]:
        """The amateur's last layer.

        Raises:
            Refused: the model has no more layers than its amateur.
        """
        if isinstance(self.amateur, str):
            return ()
        if self.amateur.layers >= config.num_hidden_layers:
            raise Refused(
                f"contrastive_decoding amateur: {{layers: {self.amateur.layers}}} must be fewer than the "
                f"{config.num_hidden_layers} layers of this model"
            )
        return (self.amateur.layers,)

    def score(self, outputs: Outputs) -> Tensor:
        """[P, V]: the contrast on the plausible tokens, -inf elsewhere."""
        ratio = self.form == "ratio"
        temperature = self.amateur_temperature or (0.5 if ratio else 1.0)
        beta = self.beta if self.beta is not None else (1.0 if ratio else 0.5)
        amateur = self._amateur_logits(outputs)  # before the expert's: one product gives both
        return contrast(outputs["main"].logits, amateur, beta, self.form, share=self.alpha, temperature=temperature)

    def _amateur_logits(self, outputs: Outputs) -> Tensor:
        if isinstance(self.amateur, str):
            return outputs["amateur"].logits
        return outputs["main"].early(norm=self.amateur.early_norm)[0]
