"""Operations on tensors, one a folder, tensors in and tensors out: ``reference.py`` is plain torch, ``triton.py`` runs on GPUs."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

_HAS_TRITON = find_spec("triton") is not None


def triton_runs(tensor: Tensor) -> bool:
    """Whether an op on this tensor has a Triton kernel to run: on a GPU, where Triton is installed."""
    return tensor.is_cuda and _HAS_TRITON
