"""Operations on tensors, one a folder, tensors in and tensors out: ``reference.py`` in plain torch, ``triton.py`` for GPUs."""

from __future__ import annotations

from importlib.util import find_spec

import torch

MOST_PROGRAMS = 65_535
"""Of a launch, in its second and third dimension."""

_HAS_TRITON = find_spec("triton") is not None


def triton_runs(device: torch.device) -> bool:
    """Whether ops on tensors of this device run their Triton kernels: on a GPU, where Triton is installed."""
    return device.type == "cuda" and _HAS_TRITON


def overlaps(device: torch.device) -> bool:
    """Whether a kernel here may begin before the one ahead of it has ended: programmatic dependent launch, Hopper and newer.

    Such a kernel reads nothing that others write before it has waited for them (``gdc_wait``), and every program waits.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
