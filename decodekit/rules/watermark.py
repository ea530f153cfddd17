"""Watermark: favour a part of the vocabulary that changes with the context, so that the text can be recognized."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import WatermarkDetector, WatermarkingConfig

from decodekit.core import compat
from decodekit.core.protocols import Rule
from decodekit.core.types import Rows


class Watermark(Rule):
    """Add a bias to the logits of the green tokens, which a hash of the row's last tokens draws from the vocabulary.

    Kirchenbauer et al., 2023, arXiv:2301.10226 (``lefthash``, algorithm 2) and 2023, arXiv:2306.04634 (``selfhash``, which
    hashes the candidate too), through transformers' processor: ``generate(watermarking_config=...)`` marks the same tokens.
    A row shorter than the context is not marked yet. Give it last, and detect with the same settings, vocabulary and kind of
    device: CPU and GPU shuffle differently. Cost: a permutation of the vocabulary a row, 40 for selfhash.
    """

    cost: ClassVar[str] = "O(V) a row, on the host"

    kind: Literal["watermark"] = "watermark"
    greenlist_ratio: float = Field(0.25, description="share of the vocabulary that is green", gt=0, lt=1)
    bias: float = Field(2.0, description="added to the logits of green tokens", allow_inf_nan=False)
    hashing_key: int = Field(15485863, description="the secret that the hash depends on", ge=1, lt=2**63)
    seeding_scheme: Literal["lefthash", "selfhash"] = Field(
        "lefthash", description="what is hashed: the last token, or the context with the candidate"
    )
    context_width: int = Field(1, description="tokens of context, for selfhash with the candidate", ge=1)

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        # Only the last tokens matter to the processor, which may thus see rows of any lengths side by side.
        marked = _processor(self, logits.shape[-1], logits.device)(rows.tail(self.context_width), logits)
        return torch.where((rows.lengths >= self.context_width).unsqueeze(-1), marked, logits)

    def detector(self, config: Any, device: str = "cpu", **options: Any) -> WatermarkDetector:
        """Transformers' detector of this mark: ``detector(ids[R, T], z_threshold=3.0)`` says which rows bear it.

        Args:
            config: of the model that wrote, for the size of its vocabulary and its BOS id.
            device: where the text was made.
            options: of the detector (``ignore_repeated_ngrams``, ...).
        """
        settings = WatermarkingConfig(**self.model_dump(exclude={"kind"}))
        return WatermarkDetector(config.get_text_config(decoder=True), device, settings, **options)


@lru_cache(maxsize=8)
def _processor(rule: Watermark, vocab_size: int, device: torch.device) -> compat.WatermarkProcessor:
    return compat.WatermarkProcessor(vocab_size, device, **rule.model_dump(exclude={"kind"}))
