"""RMSNorm against float64."""

import pytest
import torch

from decodekit.kernels.rms_norm import rms_norm


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(("shape", "offset"), [((3, 5, 64), 0.0), ((1, 1, 100), 1.0), ((2, 2048), 0.0)])
def test_equals_the_exact_norm(device, shape, offset) -> None:
    from decodekit.kernels.rms_norm import triton

    hidden, weight = torch.randn(shape, device=device) * 3, torch.randn(shape[-1], device=device)
    wide = hidden.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    for op in (rms_norm, triton.rms_norm):
        torch.testing.assert_close(op(hidden, weight, 1e-5, offset).double(), expected, atol=1e-5, rtol=1e-5)
