"""Linear layers on two to five rows at once, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from decodekit.core.swaps import Replacement, Swap, swapped

FEWEST, MOST = 2, 5


@contextmanager
def few_rows(model: nn.Module) -> Iterator[None]:
    """A context in which float32 linear layers on a CPU compute ``(W x^T)^T`` for two to five rows, where that is faster.

    On CPUs that are not Intel's, MKL multiplies ``x W^T`` for so few rows at a fraction of the speed that memory allows: two
    rows take 1.6 times as long as one (measured on an AMD EPYC, 135M weights, one thread), with the operands swapped .65
    times. On a Xeon of the fourth generation two rows take .8 times as long as one, and swapped 2.0 times. The sums are the
    same, in another order.

    Args:
        model: the model; a layer whose forward was already replaced (hooks of accelerate, ...) is left alone.
    """
    if not swapping_pays():
        yield
        return
    layers = [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"
    ]
    with swapped([Swap(layer, "forward", Replacement(_forward, layer)) for layer in layers]):
        yield


@cache
def swapping_pays() -> bool:
    """Whether torch multiplies by MKL on a CPU of another maker."""
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return torch.backends.mkl.is_available() and "GenuineIntel" not in cpu


def _forward(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """[..., in] to [..., out]."""
    rows = hidden.shape[:-1].numel()
    if not FEWEST <= rows <= MOST:
        return nn.functional.linear(hidden, layer.weight, layer.bias)
    columns = hidden.reshape(rows, -1).t()
    if layer.bias is None:
        product = torch.mm(layer.weight, columns)
    else:
        product = torch.addmm(layer.bias.unsqueeze(-1), layer.weight, columns)
    return product.t().contiguous().view(*hidden.shape[:-1], -1)
