import math

import pytest
import torch
from scipy.spatial.distance import jensenshannon

from decodekit.kernels.contrast import contrast, contrast_layers, layer_divergence


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


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(3)


@pytest.mark.parametrize("divergence", ["jsd", "official"])
@pytest.mark.parametrize("vocab_size", [5, 3000])
def test_divergence_kernel_equals_the_reference(device, unwritten, divergence, vocab_size) -> None:
    from decodekit.kernels.contrast import triton

    final, early = rows(2, vocab_size), rows(3, 2, vocab_size, seed=1)
    final[1, 3] = early[2, 1, 3] = early[0, 0, 1] = -math.inf
    own = triton.layer_divergence(final.to(device), early.to(device), divergence)
    expected = layer_divergence(final.double(), early.double(), divergence)
    torch.testing.assert_close(own.cpu().double(), expected, atol=1e-6, rtol=1e-5)


def test_forms_are_those_of_the_papers() -> None:
    expert, amateur = rows(2, 9).double(), rows(2, 9, seed=1).double()
    p, q = expert.softmax(-1), amateur.softmax(-1)
    torch.testing.assert_close(contrast(expert, amateur, 0.5), 1.5 * expert - 0.5 * amateur)
    torch.testing.assert_close(contrast(expert, amateur, 2.0, "ratio"), (p / q**2).log())
    torch.testing.assert_close(contrast(expert, amateur, 1.5, "guided"), (q * (p / q) ** 1.5).log())
    warm = contrast(expert, amateur, 1.0, "ratio", temperature=2.0)
    torch.testing.assert_close(warm, (p / (amateur / 2).softmax(-1)).log())
    weights = torch.tensor([0.0, 3.0], dtype=torch.float64)
    expected = torch.stack([expert[0], 4 * expert[1] - 3 * amateur[1]])
    torch.testing.assert_close(contrast(expert, amateur, weights), expected)


def test_implausible_and_excluded_tokens_stay_out() -> None:
    p = torch.tensor([[0.6, 0.3, 0.1, 0.0]])
    scores = contrast(p.log(), torch.tensor([[0.1, 0.1, 0.1, 0.7]]).log(), 1.0, "ratio", share=0.4)
    torch.testing.assert_close(scores, torch.tensor([[6.0, 3.0, 0.0, 0.0]]).log())
    assert torch.isfinite(contrast(p.log(), p.flip(-1).log(), 0.5)).tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
@pytest.mark.parametrize(
    ("form", "weight", "temperature"),
    [("logits", 0.5, 1.0), ("logits", None, 2.0), ("ratio", 1.0, 0.5), ("ratio", None, 1.0), ("guided", 1.7, 1.0)],
)
def test_contrast_kernel_equals_the_reference(device, unwritten, monkeypatch, form, weight, temperature, share) -> None:
    from decodekit.kernels.contrast import triton

    monkeypatch.setattr(triton, "_TOKENS", 128)
    # Rows of larger tensors, as the branches of a forward are.
    expert, amateur = rows(3, 2, 300)[:, 0], rows(3, 2, 300, seed=1)[:, 1]
    expert[:, 5] = amateur[:, 5] = expert[0, :200] = -math.inf  # whole parts of the vocabulary too
    given = torch.tensor([0.0, 0.3, 2.0]) if weight is None else weight
    own_weight = given.to(device) if isinstance(given, torch.Tensor) else given
    options = {"share": share, "temperature": temperature}
    own = triton.contrast(expert.to(device), amateur.to(device), own_weight, form, **options).cpu()
    expected = contrast(expert.double(), amateur.double(), given, form, **options)
    torch.testing.assert_close(own.double(), expected, atol=1e-5, rtol=1e-5)
    for row in range(3):
        alone = own_weight[row : row + 1] if isinstance(given, torch.Tensor) else given
        pair = expert[row : row + 1].to(device), amateur[row : row + 1].to(device)
        assert torch.equal(triton.contrast(*pair, alone, form, **options).cpu()[0], own[row])


def test_a_token_that_the_amateur_alone_excludes_is_no_nan(device) -> None:
    from decodekit.kernels.contrast import triton

    expert, amateur = torch.zeros(1, 4, device=device), torch.tensor([[0.0, 0.0, 0.0, -math.inf]], device=device)
    for form in ("logits", "ratio", "guided"):
        for weight in (0.0, 0.5, 1.0, 2.0):
            assert not triton.contrast(expert, amateur, weight, form).isnan().any()


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("divergence", ["jsd", "official"])
def test_layers_are_contrasted_as_by_the_reference(device, unwritten, divergence, share) -> None:
    from decodekit.kernels.contrast import triton

    # Of one product: the final layer's rows come first.
    together = rows(6, 4, 1500)
    final, early = together[0], together[1:]
    final[1, 7] = early[2, 1, 7] = early[0, 0, 9] = -math.inf
    final[1, 9], early[1, 2] = -40.0, final[2]
    scores, chosen, apart = triton.contrast_layers(
        final.to(device), early.to(device), share=share, divergence=divergence
    )
    expected = contrast_layers(final.double(), early.double(), share=share, divergence=divergence)
    assert chosen.tolist() == expected[1].tolist()
    assert len(set(chosen.tolist())) > 1
    torch.testing.assert_close(scores.cpu().double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(apart.cpu().double(), expected[2], atol=1e-6, rtol=1e-5)
    far = layer_divergence(final.double(), early.double(), divergence)
    assert torch.equal(expected[1], far.argmax(0))


def test_of_equally_distant_layers_the_first_is_chosen(device) -> None:
    from decodekit.kernels.contrast import reference, triton

    final, one = rows(2, 40).to(device), rows(2, 40, seed=1).to(device)
    early = torch.stack([final, one, one])
    for op in (reference.contrast_layers, triton.contrast_layers):
        assert op(final, early)[1].tolist() == [1, 1]
