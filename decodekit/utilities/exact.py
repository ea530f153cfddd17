"""Exact match: 100 for the same text, else 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from decodekit.core.protocols import Utility


class Exact(Utility):
    """Exact match, white space around the texts aside.

    Minimum Bayes risk under it is the majority vote over whole texts: right for short answers, blind for long ones, of which
    no two are equal.
    """

    cost: ClassVar[str] = "a comparison a pair"

    kind: Literal["exact"] = "exact"

    def pairwise(self, hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
        number = {text: place for place, text in enumerate({text.strip() for text in (*hypotheses, *references)})}
        ours, theirs = (torch.tensor([number[text.strip()] for text in texts]) for texts in (hypotheses, references))
        return 100.0 * (ours.unsqueeze(-1) == theirs).to(torch.float64)
