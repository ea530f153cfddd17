import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update

from decodekit.kernels.conv_step import conv_step


def drawn(rows, channels, width, tokens, device, dtype=torch.float32):
    torch.manual_seed(channels)
    normal = lambda *shape: torch.randn(shape, device=device).to(dtype)  # noqa: E731
    slots = torch.randperm(rows + 2, device=device)[:rows]
    return (
        normal(rows + 2, channels, width),
        slots,
        normal(rows, channels, tokens),
        normal(channels, width),
        normal(channels),
    )


def ops():
    from decodekit.kernels.conv_step import triton

    return conv_step, triton.conv_step


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(
    ("rows", "channels", "width", "tokens"), [(3, 40, 4, 1), (1, 300, 3, 2), (2, 7, 4, 6), (4, 1, 2, 1)]
)
@pytest.mark.parametrize("silu", [False, True])
def test_equals_transformers(device, rows, channels, width, tokens, silu) -> None:
    for op in ops():
        for biased in (False, True):
            states, slots, hidden, weight, bias = drawn(rows, channels, width, tokens, device)
            bias = bias if biased else None
            expected_states, own = states.clone(), states[slots].double()
            wide = hidden.double(), own, weight.double(), None if bias is None else bias.double()
            expected = causal_conv1d_update(*wide, "silu" if silu else None)
            expected_states[slots] = own.float()
            output = op(states, slots, hidden, weight, bias, silu)
            torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(states, expected_states, atol=0, rtol=0)


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_of_every_dtype(device, dtype) -> None:
    for op in ops():
        states, slots, hidden, weight, bias = drawn(3, 20, 4, 1, device, dtype)
        hidden = hidden.mT.contiguous().mT
        columns = torch.cat([states[slots][..., 1:], hidden], -1).double()
        expected = (columns * weight.double()).sum(-1) + bias.double()
        output = op(states, slots, hidden, weight, bias)
        assert output.dtype == dtype
        assert float((output[..., 0].double() - expected).norm() / expected.norm()) < 1e-2
        assert torch.equal(states[slots].double(), columns)


@pytest.mark.usefixtures("unwritten")
def test_rows_without_a_slot_are_zero(device) -> None:
    for op in ops():
        states, _, hidden, weight, bias = drawn(4, 20, 4, 2, device)
        slots = torch.tensor([-1, 3, -1, 0], device=device)
        before, alone = states.clone(), states.clone()
        output = op(states, slots, hidden, weight, bias, True)
        assert not output[slots < 0].any()
        assert torch.equal(output[slots >= 0], op(alone, slots[slots >= 0], hidden[slots >= 0], weight, bias, True))
        assert torch.equal(states, alone)
        others = [1, 2, 4, 5]
        assert torch.equal(states[others], before[others])


@pytest.mark.usefixtures("unwritten")
def test_strides(device) -> None:
    for op in ops():
        whole, slots, hidden, weight, bias = drawn(2, 24, 4, 3, device)
        states, other = whole[:, ::2], whole[:, ::2].clone()
        hidden = hidden.mT.contiguous().mT[:, ::2]
        expected = op(other, slots, hidden.contiguous(), weight[::2].contiguous(), bias[:12])
        assert torch.equal(op(states, slots, hidden, weight[::2], bias[:12]), expected)
        assert torch.equal(states, other)


@pytest.mark.usefixtures("unwritten")
def test_rows_with_their_own_states(device) -> None:
    for op in ops():
        states, _, *rest = drawn(3, 20, 4, 1, device)
        own, other = states[:3].clone(), states[:3].clone()
        assert torch.equal(op(own, None, *rest), op(other, torch.arange(3, device=device), *rest))
        assert torch.equal(own, other)
        assert torch.equal(own[..., -1], rest[0][..., 0])
