from itertools import product

import pytest
import torch
from transformers.models.mamba.modeling_mamba import mamba_selective_state_update
from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

from decodekit.kernels.selective_state_step import selective_state_step


def normal(*shape, device="cpu"):
    return torch.randn(shape, device=device)


def mamba(rows, channels, numbers, device, slots=None):
    """What a step of Mamba is given, all of it."""
    torch.manual_seed(channels)
    slots = torch.randperm(rows + 2)[:rows] if slots is None else torch.tensor(slots)
    hidden, step, gate = (normal(rows, channels, device=device) for _ in range(3))
    b, c = (normal(rows, numbers, device=device) for _ in range(2))
    states, a_log = normal(rows + 2, channels, numbers, device=device), normal(channels, numbers, device=device)
    d, bias = (normal(channels, device=device) for _ in range(2))
    return [states, slots.to(device), hidden, 3 * step - 3, a_log, b, c, d, gate, bias]


def mamba2(rows, heads, channels, numbers, groups, device, slots=None):
    """What a step of Mamba-2 is given, all of it."""
    torch.manual_seed(channels + heads)
    slots = torch.randperm(rows + 2)[:rows] if slots is None else torch.tensor(slots)
    hidden, gate = (normal(rows, heads, channels, device=device) for _ in range(2))
    b, c = (normal(rows, groups, numbers, device=device) for _ in range(2))
    step, a_log, d, bias = (normal(*shape, device=device) for shape in ((rows, heads), (heads,), (heads,), (heads,)))
    states = normal(rows + 2, heads, channels, numbers, device=device)
    return [states, slots.to(device), hidden, 3 * step - 3, a_log, b, c, d, gate, bias]


def exact(states, slots, hidden, step, a_log, b, c, d, gate, bias, softplus=True, limits=None):
    """Each row, head and channel by itself, from the formula; new states and outputs in float64."""
    given = (states, hidden, step, a_log, b, c, d, gate, bias)
    states, hidden, step, a_log, b, c, d, gate, bias = (None if own is None else own.double().clone() for own in given)
    single = hidden.dim() == 2
    output = torch.zeros_like(hidden)
    for row in range(len(hidden)):
        for place in product(*map(range, hidden.shape[1:])) if slots[row] >= 0 else ():
            head = place[:1]
            group = () if single else (head[0] * b.shape[1] // hidden.shape[1],)
            time = step[(row, *head)] + (0 if bias is None else bias[head])
            time = torch.nn.functional.softplus(time) if softplus else time
            time = time if limits is None else time.clamp(*limits)
            x, old = hidden[(row, *place)], states[(slots[row], *place)]
            new = (-time * a_log[head].exp()).exp() * old + time * x * b[(row, *group)]
            states[(slots[row], *place)] = new
            result = new @ c[(row, *group)] + (0 if d is None else d[head] * x)
            output[(row, *place)] = result if gate is None else result * torch.nn.functional.silu(gate[(row, *place)])
    return states, output


def ops():
    from decodekit.kernels.selective_state_step import triton

    return selective_state_step, triton.selective_state_step


def check(op, given, tolerance=1e-6, **options):
    states, slots = given[:2]
    others = [slot for slot in range(len(states)) if slot not in slots.tolist()]
    before, (expected_states, expected) = states.clone(), exact(*given, **options)
    output = op(*given, **options)
    assert output.dtype == given[2].dtype
    for found, wanted in ((output, expected), (states, expected_states)):
        assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance
    assert torch.equal(states[others], before[others])
    assert not output[slots < 0].any()


@pytest.mark.usefixtures("unwritten")
def test_equals_the_formula(device) -> None:
    for op in ops():
        for shape in ((3, 20, 16), (1, 5, 7)):
            check(op, mamba(*shape, device))
            check(op, [*mamba(*shape, device)[:7], None, None, None], limits=(0.01, 0.5))
        for shape in ((2, 4, 8, 16, 2), (3, 3, 5, 12, 1)):
            check(op, mamba2(*shape, device), limits=(0.05, 1.0))
            given = mamba2(*shape, device)
            given[3] = given[3].abs()
            check(op, [*given[:7], None, None, None], softplus=False)
        check(op, mamba2(4, 2, 4, 8, 1, device, slots=[-1, 3, -1, 0]))
        check(op, mamba(4, 6, 8, device, slots=[5, -1, 2, -1]))


@pytest.mark.usefixtures("unwritten")
def test_equals_transformers(device) -> None:
    for op in ops():
        states, slots, hidden, step, a_log, b, c, d, gate, bias = mamba2(3, 4, 8, 16, 2, device)
        own = states[slots]
        shape = (*hidden.shape, 16)
        wide = [step[..., None].expand(shape[:-1]), -a_log.exp()[:, None, None].expand(shape[1:])]
        rest = [own[:, None].expand(shape[1:-1]) for own in (d, bias)]
        expected = mamba2_selective_state_update(own, hidden, *wide, b, c, rest[0], rest[1], True, gate)
        output = op(states, slots, hidden, wide[0], None, b, c, rest[0], gate, rest[1], a=wide[1])
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states[slots], own, atol=1e-5, rtol=1e-5)
        states, slots, hidden, step, a_log, b, c, d, gate, bias = mamba(3, 20, 16, device)
        own = states[slots]
        expected = mamba_selective_state_update(own, hidden, step, -a_log.exp(), b, c, d, bias, True, gate)
        torch.testing.assert_close(
            op(states, slots, hidden, step, a_log, b, c, d, gate, bias), expected, atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(states[slots], own, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("unwritten")
def test_half_precision(device) -> None:
    for op in ops():
        for kept in (0, 1):  # states in float32, or as the rest
            for given in (mamba(2, 20, 16, device), mamba2(2, 3, 4, 16, 1, device)):
                halves = [own.bfloat16() if own.is_floating_point() else own for own in given]
                check(op, [halves[0] if kept else given[0], *halves[1:]], 1e-2)


@pytest.mark.usefixtures("unwritten")
def test_small_time_steps(device) -> None:
    """As training often makes them: their exponential is small beside 1."""
    for op in ops():
        given = mamba2(1, 2, 4, 8, 1, device)
        given[3], given[9], given[7] = given[3] * 0 - 14, given[9] * 0, given[7] * 0
        given[0].zero_()  # so that the output is in proportion to the step
        check(op, given, 1e-5)


@pytest.mark.usefixtures("unwritten")
def test_strides(device) -> None:
    for op in ops():
        given = mamba2(2, 4, 8, 16, 2, device)
        expected = op(given[0].clone(), *given[1:])
        wide = [own.clone() for own in given]
        wide[2], wide[8] = (own.mT.contiguous().mT for own in (given[2], given[8]))
        wide[5], wide[6] = torch.cat([given[5], given[6]], -1)[..., :16], given[6].mT.contiguous().mT
        torch.testing.assert_close(op(*wide), expected, atol=1e-6, rtol=1e-6)
        # As transformers' prefill leaves them.
        turned = given[0].mT.contiguous().mT
        torch.testing.assert_close(op(turned, *given[1:]), expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(turned, wide[0], atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("unwritten")
def test_rows_with_their_own_states(device) -> None:
    for op in ops():
        for states, _, *rest in (mamba(3, 20, 16, device), mamba2(3, 2, 4, 8, 1, device)):
            own, other = states[:3].clone(), states[:3].clone()
            assert torch.equal(op(own, None, *rest), op(other, torch.arange(3, device=device), *rest))
            assert torch.equal(own, other)
            assert not torch.equal(own, states[:3])


def test_states_that_would_grow_are_refused() -> None:
    states, slots, hidden, step, a_log, b, c, *_ = mamba2(2, 2, 4, 8, 1, "cpu")
    before = states.clone()
    for a in (a_log.exp(), torch.tensor([-1.0, 0.0]), torch.tensor([-1.0, torch.nan])):
        with pytest.raises(ValueError, match="below 0"):
            selective_state_step(states, slots, hidden, step, None, b, c, a=a)
    for both in ((None, None), (a_log, -a_log.exp())):
        with pytest.raises(ValueError, match="either"):
            selective_state_step(states, slots, hidden, step, both[0], b, c, a=both[1])
    assert torch.equal(states, before)
