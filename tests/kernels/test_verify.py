import pytest
import torch
from scipy.stats import chisquare

from decodekit.core.random import inverse_cdf
from decodekit.kernels.verify import verify

P = torch.tensor([0.5, 0.3, 0.15, 0.05])
Q = torch.tensor([0.4, 0.4, 0.1, 0.1])
DRAWS = 20_000


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def uniforms(generator, *shape):
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def drawn(probabilities, uniform):
    """A token by inverse CDF."""
    return int(inverse_cdf(probabilities.unsqueeze(0), uniform.reshape(1)))


def p_value(tokens, expected):
    """Of a chi-square test; cells that expect fewer than 5 are pooled."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    want = expected.double() / expected.double().sum() * len(tokens)
    small = want < 5
    if small.any():
        counts = torch.cat([counts[~small], counts[small].sum().reshape(1)])
        want = torch.cat([want[~small], want[small].sum().reshape(1)])
    counts, want = counts[want > 0], want[want > 0]
    return float(chisquare(counts.numpy(), want.numpy()).pvalue)


def test_acceptance_and_residual_by_hand() -> None:
    for token, accept in enumerate([1.0, 0.75, 1.0, 0.5]):
        kept, _ = verify(P, [token], Q[None], [accept - 1e-6])
        assert kept == 0
        if accept < 1:
            rejected, left = verify(P, [token], Q[None], [accept + 1e-6])
            assert rejected is None
            torch.testing.assert_close(left, torch.tensor([2 / 3, 0, 1 / 3, 0]).double(), atol=1e-7, rtol=0)


def test_a_target_need_not_be_normalized() -> None:
    assert verify(3 * P, [1], 7 * Q[None], [0.76])[0] is None
    assert verify(3 * P, [1], 7 * Q[None], [0.74])[0] == 0


def test_a_token_without_probability_is_never_accepted() -> None:
    place, left = verify(torch.tensor([0.0, 1.0]), [0], torch.tensor([[0.5, 0.5]]), [0.0])
    assert place is None
    assert left.tolist() == [0, 1]


def test_a_draft_from_the_target_itself_is_always_accepted(generator) -> None:
    for _ in range(50):
        p = torch.rand(50, generator=generator).softmax(0)
        assert verify(p, [drawn(p, uniforms(generator))], p[None], [0.999999])[0] == 0


def sibling_rounds(p, q, count, generator, *, replacement=False):
    """The tokens after rounds in which ``count`` siblings were drawn; all rounds are drawn at once, and verified one by one."""
    own, rows, columns = q.expand(DRAWS, -1).clone(), [], []
    for _ in range(count):
        rows.append(own / own.sum(-1, keepdim=True))
        columns.append(inverse_cdf(rows[-1], uniforms(generator, DRAWS)))
        if not replacement:
            own = own.scatter(1, columns[-1].unsqueeze(1), 0.0)
    drafted, accepts = torch.stack(columns, dim=1).tolist(), uniforms(generator, DRAWS, count).tolist()
    found = [verify(p, *each) for each in zip(drafted, torch.stack(rows, dim=1), accepts, strict=True)]
    after = inverse_cdf(torch.stack([left for _, left in found]), uniforms(generator, DRAWS)).tolist()
    places = [place for place, _ in found]
    return [
        token if place is None else siblings[place]
        for place, siblings, token in zip(places, drafted, after, strict=True)
    ]


@pytest.mark.parametrize(("count", "replacement"), [(1, False), (3, False), (2, True)])
def test_siblings_leave_the_target_distribution(count, replacement, generator) -> None:
    assert p_value(sibling_rounds(P, Q, count, generator, replacement=replacement), P) > 1e-3


def tokens_a_pass(rounds, generator, *, bonus=True):
    """Of chains of 4 drafts at acceptance .8, which is the overlap of p and q."""
    p, q = torch.tensor([0.4, 0.6]), torch.tensor([[0.6, 0.4]])
    tokens = 0
    draws = zip(uniforms(generator, rounds, 4).tolist(), uniforms(generator, rounds, 4).tolist(), strict=True)
    for own, accepts in draws:
        accepted = 0
        for uniform, accept in zip(own, accepts, strict=True):
            if verify(p, [int(uniform >= 0.6)], q, [accept])[0] is None:
                break
            accepted += 1
        tokens += accepted + (1 if accepted < 4 or bonus else 0)
    return tokens / rounds


@pytest.mark.parametrize(("rounds", "near"), [(5_000, 0.07), pytest.param(200_000, 0.02, marks=pytest.mark.slow)])
def test_tokens_a_pass_are_those_of_the_formula(rounds, near, generator) -> None:
    """(1 - .8 ** 5) / .2 = 3.3616 (Leviathan et al., 2023, eq. 1)."""
    assert abs(tokens_a_pass(rounds, generator) - 3.3616) < near


def test_the_formula_sees_a_missing_bonus_token(generator) -> None:
    assert abs(tokens_a_pass(5_000, generator, bonus=False) - 3.3616) > 0.3


# What a wrong verifier does, and the test above sees.


def wrong_softmax_of_an_argmax(generator):
    token = int(Q.argmax())
    place, left = verify(P, [token], Q[None], uniforms(generator, 1).tolist())
    return token if place is not None else drawn(left, uniforms(generator))


def wrong_scalar_residual(generator):
    token = drawn(Q, uniforms(generator))
    if float(uniforms(generator)) * Q[token] < P[token]:
        return token
    left = P.clone()
    left[token] = (P[token] - Q[token]).clamp(min=0)
    return drawn(left, uniforms(generator))


def wrong_greedy_match(generator):
    token = drawn(Q, uniforms(generator))
    return token if token == int(P.argmax()) else drawn(P, uniforms(generator))


@pytest.mark.parametrize("wrong", [wrong_softmax_of_an_argmax, wrong_scalar_residual, wrong_greedy_match])
def test_the_chi_square_test_sees_a_wrong_verifier(wrong, generator) -> None:
    assert p_value([wrong(generator) for _ in range(DRAWS // 4)], P) < 1e-3


def test_the_chi_square_test_sees_a_draw_shared_by_a_batch(generator) -> None:
    """Each row alone is distributed right; pairs of rows are not."""

    def pair(shared):
        pairs = []
        for _ in range(DRAWS // 4):
            first = uniforms(generator, 3)
            second = first if shared else uniforms(generator, 3)
            one, two = (
                drawn(left, own[2]) if place is None else token
                for own in (first, second)
                for token in [drawn(Q, own[0])]
                for place, left in [verify(P, [token], Q[None], [float(own[1])])]
            )
            pairs.append(4 * one + two)
        return p_value(pairs, torch.outer(P, P).flatten())

    assert pair(shared=False) > 1e-3
    assert pair(shared=True) < 1e-6
