"""Rotary position embeddings against complex numbers in float64."""

import pytest
import torch

from decodekit.kernels.rotary import rotary


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(
    ("rows", "count", "heads", "key_heads", "width"), [(1, 1, 4, 2, 16), (3, 2, 5, 1, 6), (2, 1, 40, 8, 64)]
)
def test_turns_each_pair_by_its_angle(device, rows, count, heads, key_heads, width) -> None:
    from decodekit.kernels.rotary import triton

    query = torch.randn(rows, count, heads, width, device=device).transpose(1, 2)
    key = torch.randn(rows, count, key_heads, width, device=device).transpose(1, 2)
    angle = torch.rand(rows, count, width // 2, device=device) * 6
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angle.cos(), angle.sin()))

    def turned(given):
        left, right = given.double().chunk(2, dim=-1)
        whole = torch.complex(left, right) * torch.polar(torch.ones_like(angle), angle).to(torch.complex128).unsqueeze(
            1
        )
        return torch.cat([whole.real, whole.imag], dim=-1)

    for op in (rotary, triton.rotary):
        for given, result in zip((query, key), op(query, key, cos, sin), strict=True):
            assert result.shape == given.shape
            torch.testing.assert_close(result.double(), turned(given), atol=1e-5, rtol=1e-5)
