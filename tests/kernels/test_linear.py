"""Linear layers on few rows against float64."""

import pytest
import torch

from decodekit.kernels.linear import gated_linear, linear


def exact(hidden, weights, biases, residual):
    parts = [torch.nn.functional.linear(hidden.double(), weight.double()) for weight in weights]
    parts = [part if bias is None else part + bias.double() for part, bias in zip(parts, biases, strict=True)]
    output = torch.cat(parts, dim=-1)
    return output if residual is None else output + residual.double()


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("rows", [1, 2, 3, 17])
@pytest.mark.parametrize(
    ("sizes", "width", "bias", "residual"),
    [
        ((40,), 256, False, True),
        ((33, 7, 18), 100, False, False),
        ((48, 16, 16), 512, True, False),
        ((5,), 300, True, True),
    ],
)
def test_equals_the_exact_product(device, rows, sizes, width, bias, residual) -> None:
    from decodekit.kernels.linear import triton

    torch.manual_seed(rows)
    hidden, weights = torch.randn(rows, width, device=device), [torch.randn(n, width, device=device) for n in sizes]
    biases = [torch.randn(n, device=device) if bias else None for n in sizes]
    added = torch.randn(rows, sum(sizes), device=device) if residual else None
    expected = exact(hidden, weights, biases, added)
    for op in (linear, triton.linear):
        torch.testing.assert_close(op(hidden, weights, biases, added).double(), expected, atol=1e-4, rtol=1e-5)


def test_a_strided_input_and_half_precision(device) -> None:
    from decodekit.kernels.linear import triton

    hidden = torch.randn(4, 512, device=device).half()[:, :256]
    weight = torch.randn(32, 256, device=device).half()
    output, expected = triton.linear(hidden, [weight], [None]), exact(hidden, [weight], [None], None)
    assert output.dtype == torch.float16
    assert float((output - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(("rows", "size", "width"), [(1, 40, 256), (5, 33, 100), (17, 16, 512), (40, 16, 256)])
def test_gated_equals_the_exact_product(device, rows, size, width) -> None:
    from decodekit.kernels.linear import triton

    torch.manual_seed(rows)
    hidden, gate, up = (torch.randn(n, width, device=device) for n in (rows, size, size))
    gates, ups = (torch.nn.functional.linear(hidden.double(), weight.double()) for weight in (gate, up))
    expected = torch.nn.functional.silu(gates) * ups
    for op in (gated_linear, triton.gated_linear):
        torch.testing.assert_close(op(hidden, gate, up).double(), expected, atol=1e-3, rtol=1e-5)
