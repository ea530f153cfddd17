import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodekit.kernels.kv_quantize import BITS, dequantize, quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DISTRIBUTIONS = ["normal", "offset", "outliers", "constant", "zeros", "tiny", "one outlier"]


def numbers_of(distribution: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    numbers = {
        "normal": normal,
        "offset": normal * 0.05 + 7,
        "outliers": normal * 1e4,
        "constant": torch.full(shape, -3.3),
        "zeros": torch.zeros(shape),
        "tiny": normal * 1e-6,
        "one outlier": torch.where(torch.arange(normal.numel()).view(shape) == 5, 1e4, normal),
    }
    return numbers[distribution].to(dtype)


def round_trip(numbers: Tensor, dim: int, kind: str) -> Tensor:
    codes, scales = quantize(numbers, dim, kind)
    assert codes.dtype == torch.uint8
    assert codes.shape == (*numbers.shape[:-1], math.ceil(numbers.shape[-1] * BITS[kind] / 8))
    assert scales.itemsize == 2
    return dequantize(codes, scales, kind, numbers.shape[-1], numbers.dtype)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("kind", ["int8", "int4", "int2"])
def test_integers_err_by_half_a_step_at_most(kind: str, dim: int, dtype: torch.dtype, distribution: str) -> None:
    for shape in ((1, 1, 1, 1), (2, 16, 3, 64), (1, 5, 2, 7)):
        numbers = numbers_of(distribution, shape, dtype)
        exact = numbers.double()
        result = round_trip(numbers, dim, kind)
        assert result.dtype == dtype
        step = (exact.amax(dim, True) - exact.amin(dim, True)) / (2 ** BITS[kind] - 1)
        largest = exact.abs().amax(dim, True)
        if dtype == torch.float32:
            bound = torch.maximum(step / 2 * (1 + 1e-5), (largest * 2**-10).clamp(min=2**-24))
        else:
            unit = torch.finfo(dtype).eps * result.double().abs().clamp(min=torch.finfo(dtype).smallest_normal)
            bound = step / 2 * (1 + 1e-5) + unit / 2
        assert ((result.double() - exact).abs() <= bound).all()


def test_int8_errs_by_half_a_step_of_zero_mean_float32() -> None:
    numbers = numbers_of("normal", (4, 16, 3, 64), torch.float32)
    half = (numbers.amax(1, True) - numbers.amin(1, True)) / 255 / 2
    assert ((round_trip(numbers, 1, "int8") - numbers).abs() <= half * (1 + 1e-5)).all()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, -1])
def test_fp8_keeps_four_bits_of_a_number(dim: int, dtype: torch.dtype, distribution: str) -> None:
    numbers = numbers_of(distribution, (2, 16, 3, 65), dtype)
    exact = numbers.double()
    result = round_trip(numbers, dim, "fp8")
    bound = exact.abs() * 2**-4 + exact.abs().amax(dim, True) * 2**-17
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_group_comes_back(dtype: torch.dtype, kind: str) -> None:
    for number in (0.0, 1.0, -0.375, 1.75, 448.0):
        numbers = torch.full((2, 4, 1, 6), number, dtype=dtype)
        assert torch.equal(round_trip(numbers, 1, kind), numbers)


@pytest.mark.parametrize("kind", ["int8", "int4", "int2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_a_group_come_back_however_far_apart(dtype: torch.dtype, kind: str) -> None:
    numbers = torch.tensor([[-1e4, 2**-12], [-(2**-12), 1e4]]).to(dtype)
    assert torch.equal(round_trip(numbers, -1, kind), numbers)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantizing_again_changes_nothing(dtype: torch.dtype, kind: str) -> None:
    @settings(max_examples=60)
    @given(
        seed=st.integers(0, 10**6),
        exponent=st.integers(-12, 4),
        offset=st.floats(-300, 300),
        dim=st.sampled_from([1, -1]),
    )
    def check(seed: int, exponent: int, offset: float, dim: int) -> None:
        normal = torch.randn((3, 16, 2, 33), generator=torch.Generator().manual_seed(seed))
        numbers = (normal * 10.0**exponent + offset).clamp(-6e4, 6e4).to(dtype)
        once = round_trip(numbers, dim, kind)
        assert torch.equal(round_trip(once, dim, kind), once)

    check()


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantizing_again_changes_no_extreme(dtype: torch.dtype, kind: str) -> None:
    limit = min(torch.finfo(dtype).max, 1e38)

    @settings(max_examples=100)
    @given(st.lists(st.floats(-limit, limit), min_size=1, max_size=12))
    def check(group: list[float]) -> None:
        numbers = torch.tensor([group], dtype=torch.float64).to(dtype)
        once = round_trip(numbers, -1, kind)
        assert once.isfinite().all()
        assert torch.equal(round_trip(once, -1, kind), once)

    check()


@pytest.mark.parametrize("kind", ["int8", "int4", "int2"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nan_stays_visible_in_its_group_alone(kind: str, bad: float) -> None:
    numbers = numbers_of("normal", (2, 4, 2, 7), torch.float32)
    clean = round_trip(numbers, 1, kind)
    numbers[1, 2, 0, 3] = bad
    result = round_trip(numbers, 1, kind)
    assert not result[1, :, 0, 3].isfinite().any()
    clean[1, :, 0, 3] = result[1, :, 0, 3] = 0
    assert torch.equal(result, clean)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_in_fp8_a_nan_stays_alone(bad: float) -> None:
    numbers = numbers_of("normal", (2, 4, 2, 7), torch.float32)
    numbers[1, 2, 0, 3] = 0
    clean = round_trip(numbers, 1, "fp8")
    numbers[1, 2, 0, 3] = bad
    result = round_trip(numbers, 1, "fp8")
    assert result[1, 2, 0, 3].isnan()
    clean[1, 2, 0, 3] = math.nan
    assert torch.equal(result.nan_to_num(9e9), clean.nan_to_num(9e9))


def test_float32_beyond_float16_is_cut_not_infinite() -> None:
    numbers = torch.tensor([[1e5, 1e6, 3.0], [1e5, 1e6, 1e7], [-1e5, -1e6, -1e7]])
    result = round_trip(numbers, -1, "int8")
    assert result.tolist() == [[65504, 65504, 3], [65504] * 3, [-65504] * 3]


def test_parts_of_a_row_lie_above_each_other_in_its_bytes() -> None:
    codes, scales = quantize(torch.tensor([[0.0, 1.0, 2.0, 15.0, 3.0]]), -1, "int4")
    assert codes.tolist() == [[0xF0, 0x31, 0x02]]
    assert scales.flatten().tolist() == [0, 15]
    codes, _ = quantize(torch.tensor([[0.0, 1.0, 2.0, 3.0, 3.0]]), -1, "int2")
    assert codes.tolist() == [[0b111000, 0b1101]]
