"""Cosine of the mean-pooled hidden states of a local model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from decodekit.core.extras import load_other_model
from decodekit.core.protocols import Utility


class Embedding(Utility):
    """100 times the cosine of two texts' embeddings, the mean of the model's last hidden states over their tokens.

    Reimers and Gurevych, 2019, arXiv:1908.10084, section 3. It sees meaning where n-grams see form, as far as the model was
    trained for it: a sentence encoder is right, the states of a plain language model are all alike. Texts that point away
    from each other score below 0.
    """

    cost: ClassVar[str] = "1 forward of the model a text"

    kind: Literal["embedding"] = "embedding"
    model: str = Field(description="a Hugging Face id or a local folder, such as a sentence encoder")

    @override
    def resolve(self, tokenizer: Any) -> Self:
        self._loaded()
        return self

    def pairwise(self, hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
        return 100 * self._embed(hypotheses) @ self._embed(references).T

    @override
    def aggregated(self, hypotheses: Sequence[str], references: Sequence[str], weights: Tensor) -> Tensor:
        # Unit vectors: the cosine with each, averaged, is the product with their mean.
        return 100 * self._embed(hypotheses) @ (weights.to(torch.float64) @ self._embed(references))

    def _loaded(self) -> tuple[Any, Any]:
        return load_other_model(self.model, "AutoModel", self.kind)

    @torch.no_grad()
    def _embed(self, texts: Sequence[str]) -> Tensor:
        """[N, H] float64 unit vectors, zero for a text without tokens; each text alone, so that no pad has a part in it."""
        model, tokenizer = self._loaded()
        known: dict[str, Tensor] = {}
        for text in dict.fromkeys(texts):
            ids = tokenizer(text, return_tensors="pt", truncation=True).input_ids.to(model.device)
            if ids.shape[1]:
                states = model(input_ids=ids).last_hidden_state[0].to(torch.float64).mean(0)
            else:
                states = torch.zeros(model.config.hidden_size, dtype=torch.float64)
            known[text] = torch.nn.functional.normalize(states.cpu(), dim=0)
        return torch.stack([known[text] for text in texts])
