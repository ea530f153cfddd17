import itertools

import pytest
import torch

from decodekit.kernels.gated_delta import chunked_gated_delta, gated_delta, reference


def drawn(
    rows, tokens, key_heads, heads, keys, values, device, dtype=torch.float32, states_dtype=torch.float32, slots=None
):
    """States, slots in disorder, and what tokens bring; of lengths that a normalized key or query does not have."""
    torch.manual_seed(rows + tokens + keys)
    normal = lambda *shape: torch.randn(shape, device=device)  # noqa: E731
    states = normal(rows + 3, heads, keys, values).to(states_dtype)
    slots = torch.randperm(rows + 3, device=device)[:rows] if slots is None else torch.tensor(slots, device=device)
    query, key = (normal(2, rows, tokens, key_heads, keys) * keys**-0.5).to(dtype)
    value = normal(rows, tokens, heads, values).to(dtype)
    decay = -normal(rows, tokens, heads).exp() * 0.3
    return states, slots, query, key, value, decay, normal(rows, tokens, heads).sigmoid().to(dtype)


def exact(states, slots, query, key, value, decay, beta, scale=None, normalize=False, lengths=None):
    """Each row and head by itself, from the formula; new states and outputs in float64."""
    states, query, key, value, decay, beta = (own.double().clone() for own in (states, query, key, value, decay, beta))
    rows, tokens, heads, _ = value.shape
    output, identity = torch.zeros_like(value), torch.eye(key.shape[-1], dtype=torch.float64, device=key.device)
    for row in range(rows):
        for head in range(heads if slots[row] >= 0 else 0):
            state = states[slots[row], head]
            for token in range(tokens if lengths is None else int(lengths[row])):
                place = row, token, head * key.shape[2] // heads
                q, k = query[place], key[place]
                if normalize:
                    q, k = (own / (own @ own + 1e-6).sqrt() for own in (q, k))
                share = beta[row, token, head]
                left = identity - share * torch.outer(k, k)
                state = decay[row, token, head].exp() * left @ state + share * torch.outer(k, value[row, token, head])
                output[row, token, head] = state.T @ q * (len(k) ** -0.5 if scale is None else scale)
            states[slots[row], head] = state
    return states, output


def check(op, given, tolerance, **options):
    states, *rest = given
    untouched = [slot for slot in range(len(states)) if slot not in rest[0].tolist()]
    before, (expected_states, expected) = states.clone(), exact(*given, **options)
    output = op(states, *rest, **options)
    assert output.dtype == rest[3].dtype
    for found, wanted in ((output, expected), (states, expected_states)):
        assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance
    assert torch.equal(states[untouched], before[untouched])
    assert not output[rest[0] < 0].any()


SHAPES = [
    (3, 1, 1, 1, 16, 16),
    (1, 2, 2, 4, 12, 20),  # grouped heads of odd sizes
    (1, 2, 3, 3, 33, 7),
]


def ops(form):
    from decodekit.kernels.gated_delta import triton
    from decodekit.kernels.gated_delta.chunked import triton as chunks

    if form == "step":
        return gated_delta, triton.gated_delta
    return chunked_gated_delta, chunks.chunked_gated_delta


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(
    ("shape", "normalize", "scale"),
    [
        pytest.param(shape, normalize, scale, marks=[] if (place + normalize + bool(scale)) % 2 else pytest.mark.slow)
        for place, shape in enumerate(SHAPES)
        for normalize in (False, True)
        for scale in (None, 0.3)
    ],
)
def test_step_equals_the_formula(device, shape, normalize, scale) -> None:
    for op in ops("step"):
        check(op, drawn(*shape, device), 1e-6, normalize=normalize, scale=scale)


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("form", ["step", "chunks"])
def test_rows_without_a_slot_are_zero(device, form) -> None:
    for op in ops(form):
        for slots in ([-1, 4, -1, 0], [-1] * 4):
            given = drawn(4, 2, 1, 2, 16, 16, device, slots=slots)
            before = given[0].clone()
            if max(slots) < 0:
                assert not op(*given).any()
                assert torch.equal(given[0], before)
            else:
                check(op, given, 1e-6)


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("states_dtype", [torch.bfloat16, torch.float32])
def test_half_precision(device, states_dtype) -> None:
    # The interpreter multiplies the bits of matrices of bfloat16, not their numbers.
    chunks = torch.bfloat16 if device == "cuda" else torch.float16
    for form, tokens, dtype in (("step", 1, torch.bfloat16), ("chunks", 70, chunks)):
        for op in ops(form):
            check(op, drawn(2, tokens, 1, 2, 16, 32, device, dtype, states_dtype), 1e-2, normalize=True)


QUICK = [(1, 1.0, False), (64, 60.0, True), (150, 60.0, False), (150, 1.0, True)]


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(
    ("tokens", "size", "normalize"),  # what decays to nothing within a few tokens would grow past all bounds backwards
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in itertools.product([1, 64, 150], [1.0, 60.0], [False, True])
    ],
)
def test_chunks_equal_the_formula(device, tokens, size, normalize) -> None:
    for op in ops("chunks"):
        given = drawn(1 if tokens > 64 else 2, tokens, 1, 2, 12, 20, device)
        given = *given[:5], given[5] * size, given[6]
        check(op, given, 1e-5, normalize=normalize)


@pytest.mark.usefixtures("unwritten")
def test_rows_of_other_lengths(device) -> None:
    lengths = torch.tensor([1, 90, 128, 64, 0], device=device)
    for op in ops("chunks"):
        given = drawn(5, 130, 1, 1, 16, 16, device)
        check(op, given, 1e-5, lengths=lengths)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_both_forms_agree(dtype, tolerance, size) -> None:
    given = [own.to(dtype) if own.is_floating_point() else own for own in drawn(2, 200, 2, 4, 16, 24, "cpu")]
    given[5] = given[5] * size  # decays to nothing within a few tokens: their products have no logarithm in range
    other = [own.clone() for own in given]
    outputs = reference.gated_delta(*given, normalize=True), reference.chunked_gated_delta(*other, normalize=True)
    torch.testing.assert_close(*outputs, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(given[0], other[0], atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("unwritten")
def test_a_key_that_comes_again_and_again(device) -> None:
    for op in ops("chunks"):
        states, slots, query, key, value, decay, beta = drawn(1, 64, 1, 1, 16, 16, device)
        key, decay, beta = key[:, :1].expand_as(key), torch.zeros_like(decay), torch.ones_like(beta)
        check(op, (states, slots, query, key, value, decay, beta), 1e-5, normalize=True)


@pytest.mark.usefixtures("unwritten")
def test_strides(device) -> None:
    """Queries, keys and values as views of one projection, states and slots as views of more."""
    for form in ("step", "chunks"):
        for op in ops(form):
            whole = torch.randn(2, 3, 3, 2, 16, device=device)
            query, key, value = whole.unbind(2)
            states, slots = (
                torch.randn(5, 2, 2, 16, 16, device=device)[:, 1],
                torch.tensor([[4, 1], [2, 0]], device=device)[:, 0],
            )
            decay, beta = -torch.rand(2, 2, 3, device=device).mT, torch.rand(2, 3, 4, device=device)[..., ::2]
            check(op, (states, slots, query, key, value, decay, beta), 1e-5, normalize=True)


@pytest.mark.usefixtures("unwritten")
def test_rows_with_their_own_states(device) -> None:
    for form, tokens in (("step", 2), ("chunks", 70)):
        for op in ops(form):
            states, _, *rest = drawn(3, tokens, 1, 2, 16, 16, device)
            own, other = states[:3].clone(), states[:3].clone()
            output = op(own, None, *rest)
            torch.testing.assert_close(output, op(other, torch.arange(3, device=device), *rest), atol=0, rtol=0)
            assert torch.equal(own, other)
            assert not torch.equal(own, states[:3])
