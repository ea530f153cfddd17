"""Linear layers on few rows, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from decodekit.core.swaps import Replacement, Swap, swapped

MOST, MOST_OF_ONE_THREAD = 64, 9


@contextmanager
def few_rows(model: nn.Module) -> Iterator[None]:
    """A context in which float32 linear layers on a CPU compute ``(W x^T)^T`` for few rows, where that is faster.

    On CPUs that are not Intel's, MKL multiplies ``x W^T`` for so few rows at a fraction of the speed that memory allows. On an
    AMD EPYC (135M weights, two threads) one to eight rows took 35, 56, 70, 51, 45, 49, 62 and 47 ms; with the operands swapped,
    one row filled up to two and three to four, 19, 18, 20, 20, 27, 33, 39 and 38 ms. More rows are multiplied 16 at a time: on
    a slower one, 8, 12, 16, 24, 32, 48 and 64 rows took 125, 132, 132, 149, 170, 202 and 238 ms, and swapped, filled up to 16
    and 32, 65, 87, 85, 122, 126, 160 and 199 ms; with one thread, from ten rows on nothing is gained. On a Xeon of the fourth
    generation two rows take .8 times as long as one, and swapped 2.0 times. The sums are the same, in another order.

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
    if not 1 <= rows <= (MOST if torch.get_num_threads() > 1 else MOST_OF_ONE_THREAD):
        return nn.functional.linear(hidden, layer.weight, layer.bias)
    columns = nn.functional.pad(hidden.reshape(rows, -1), (0, 0, 0, _filled(rows) - rows)).t()
    if layer.bias is None:
        product = torch.mm(layer.weight, columns)
    else:
        product = torch.addmm(layer.bias.unsqueeze(-1), layer.weight, columns)
    return product[:, :rows].t().contiguous().view(*hidden.shape[:-1], -1)


def _filled(rows: int) -> int:
    """How many rows these are filled up to, as that is faster."""
    if 9 < rows <= 32:
        return -(-rows // 16) * 16
    return {1: 2, 3: 4}.get(rows, rows)
