"""The n largest of each row, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def keep_largest(logits: Tensor, counts: Tensor, leading: Tensor) -> Tensor:
    """Mask all but the ``counts[p]`` largest logits of each row p; among equal ones those of the lowest ids are kept.

    Ties are common, not exotic: logits that a model computed in bfloat16 take a few hundred different values.

    Args:
        logits: [P, V].
        counts: [P, 1] int64, at least 1.
        leading: [P, K] the K largest logits of each row, largest first; K > counts, or K = V.

    Returns:
        [P, V], a new tensor with ``-inf`` at what is masked. NaN entries are kept, so that they stay visible.
    """
    smallest = leading.gather(1, counts - 1)
    dropped = logits < smallest
    following = leading.gather(1, counts.clamp(max=leading.shape[1] - 1))
    # On a GPU the test would cost more than it saves: it makes the host wait.
    if logits.is_cuda or bool((smallest == following).any()):
        tied = logits == smallest
        wanted = counts - (leading > smallest).sum(-1, keepdim=True)
        dropped |= tied & (tied.cumsum(-1, dtype=torch.int32) > wanted)
    return torch.where(dropped, -math.inf, logits)
