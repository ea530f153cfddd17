import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from decodekit.core.random import Stream
from decodekit.core.types import Request
from decodekit.rules.mirostat import Mirostat
from decodekit.runtime.pipeline import Pipeline
from decodekit.testing import check_rule, make_rows

REQUEST = Request(0, (5,), Stream(0, 0, 0))


@pytest.mark.parametrize("tau", [0.1, 3.0, 20.0])
def test_obeys_the_laws_of_a_rule(tau: float) -> None:
    check_rule(Mirostat(tau=tau, eta=0.3))


def test_keeps_what_surprises_by_at_most_mu_bits_and_else_the_most_likely() -> None:
    # 1, 2, 3, 4 and 4 bits.
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]] * 3, dtype=torch.float64).log()
    result = Mirostat()(make_rows([[5]] * 3, states=[3.5, 2.01, 0.3]), logits)
    assert (result > -torch.inf).sum(-1).tolist() == [3, 2, 1]


def test_mu_starts_at_twice_tau_and_follows_the_surprise() -> None:
    rule = Mirostat(tau=3.0, eta=0.5)
    mu = rule.init_state(REQUEST)
    assert mu == 6.0
    # 1 bit is 2 less than the target, 5 bits are 2 more.
    assert rule.commit(mu, 0, torch.tensor([0.5, 0.5]).log()) == pytest.approx(7.0)
    assert rule.commit(mu, 3, torch.full((32,), 1 / 32, dtype=torch.float64).log()) == pytest.approx(5.0)


@pytest.mark.parametrize("tau", [2.0, 4.0])
def test_the_surprise_of_what_is_sampled_comes_to_tau(tau: float) -> None:
    generator = torch.Generator().manual_seed(1)
    rule = Mirostat(tau=tau, eta=0.2)
    pipeline, rows, mu = Pipeline([("mirostat", rule)], sample=True), make_rows([[5]]), rule.init_state(REQUEST)
    surprises = []
    for step in range(600):
        # The entropy of the distributions themselves is about 8 bits.
        scores = 1.5 * torch.randn(1, 1000, generator=generator)
        rows = replace(rows, lengths=torch.tensor([1 + step]))
        picked = pipeline(rows, scores, [[mu]])
        surprises.append(-float(picked.final.log_softmax(-1)[0, picked.tokens[0]]) / math.log(2))
        mu = rule.commit(mu, int(picked.tokens[0]), picked.final[0])
    assert sum(surprises[100:]) / 500 == pytest.approx(tau, abs=0.1)


@pytest.mark.parametrize("options", [{"tau": 0}, {"tau": float("inf")}, {"eta": 0}, {"eta": float("nan")}])
def test_refuses_what_cannot_be_followed(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=r"greater than 0|finite number"):
        Mirostat(**options)
