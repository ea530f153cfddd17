import math

import pytest
import torch
from scipy.spatial.distance import jensenshannon

from decodekit.kernels.layer_divergence import layer_divergence


@pytest.fixture
def distributions():
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(3, 11, generator=generator, dtype=torch.float64).mul(3).log_softmax(-1)
    early = torch.randn(4, 3, 11, generator=generator, dtype=torch.float64).mul(3).log_softmax(-1)
    return final, early


def test_jsd_equals_scipy_in_nats(distributions) -> None:
    final, early = distributions
    divergence = layer_divergence(final, early)
    expected = [[jensenshannon(p.exp(), q.exp()) ** 2 for p, q in zip(final, layer, strict=True)] for layer in early]
    torch.testing.assert_close(divergence, torch.tensor(expected, dtype=torch.float64))


def test_official_is_the_mixture_against_each(distributions) -> None:
    final, early = distributions
    p, q = final.exp(), early.exp()
    m = (p + q) / 2
    expected = 0.5 * ((m * (m / p).log()).sum(-1) + (m * (m / q).log()).sum(-1))
    torch.testing.assert_close(layer_divergence(final, early, "official"), expected)
    assert not torch.allclose(layer_divergence(final, early, "official"), layer_divergence(final, early))


def test_tokens_without_mass_add_nothing_and_disjoint_distributions_reach_log_2() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).log()
    q = torch.tensor([[[0.0, 0.0, 0.5, 0.5]], [[0.5, 0.5, 0.0, 0.0]]]).log()
    assert layer_divergence(p, q).flatten().tolist() == pytest.approx([math.log(2), 0.0], abs=1e-7)


def test_rows_do_not_depend_on_each_other(distributions) -> None:
    final, early = distributions
    whole = layer_divergence(final, early)
    for row in range(3):
        assert torch.equal(whole[:, row], layer_divergence(final[row : row + 1], early[:, row : row + 1])[:, 0])


@pytest.mark.parametrize("divergence", ["jsd", "official"])
def test_kernel_equals_the_reference(device, divergence) -> None:
    from decodekit.kernels.layer_divergence import triton

    generator = torch.Generator().manual_seed(0)
    final = torch.randn(2, 3000, generator=generator).mul(3).log_softmax(-1)
    early = torch.randn(3, 2, 3000, generator=generator).mul(3).log_softmax(-1)
    final[1, 7] = early[2, 1, 7] = early[0, 0, 9] = -math.inf
    own = triton.layer_divergence(final.to(device), early.to(device), divergence)
    expected = layer_divergence(final.double(), early.double(), divergence)
    torch.testing.assert_close(own.cpu().double(), expected, atol=1e-6, rtol=1e-5)
