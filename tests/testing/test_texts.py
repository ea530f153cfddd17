from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from decodekit import CompiledConstraint, Constraint, Scorer, Utility, Vocabulary
from decodekit.core import registry
from decodekit.testing import check_constraint, check_scorer, check_utility


@pytest.mark.parametrize("kind", ["logprob", {"kind": "regex", "pattern": "answer"}, "json"])
def test_our_scorers_obey(kind) -> None:
    check_scorer(registry.create("scorers", kind))


@pytest.mark.parametrize("kind", ["chrf", "chrfpp", "exact"])
def test_our_utilities_obey(kind) -> None:
    check_utility(registry.create("utilities", kind))


@pytest.mark.parametrize(
    ("spec", "accepted", "refused"),
    [
        ({"kind": "choice", "choices": ["the one", "that"]}, ["the one", "that"], ["the", "thatthe", ""]),
        ({"kind": "regex", "pattern": "[a-c]{1,3}"}, ["a", "cab"], ["", "abca", "d"]),
        ({"kind": "phrases", "contains": ["the"]}, ["the", "is the one"], ["", "teh"]),
    ],
)
def test_our_constraints_obey(spec, accepted, refused) -> None:
    check_constraint(registry.create("constraints", spec), accepted=accepted, refused=refused)


class First(Scorer):
    """Likes who comes first."""

    kind: Literal["first"] = "first"

    def score(self, prompt: str, candidates: Sequence) -> Sequence[float]:
        return [float(-place) for place in range(len(candidates))]


class Relative(Utility):
    """Judges a pair by the others."""

    kind: Literal["relative"] = "relative"

    def pairwise(self, hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
        lengths = torch.tensor([float(len(own)) for own in hypotheses], dtype=torch.float64)
        return (lengths / lengths.sum().clamp(min=1)).unsqueeze(-1).expand(-1, len(references))


class Halved(Utility):
    """In the wrong precision."""

    kind: Literal["halved"] = "halved"

    def pairwise(self, hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
        return torch.ones(len(hypotheses), len(references))


class Deaf(Constraint):
    """A language that it claims and another one that it compiles."""

    kind: Literal["deaf"] = "deaf"

    def compile(self, vocabulary: Vocabulary) -> CompiledConstraint:
        return registry.create("constraints", {"kind": "regex", "pattern": "[0-9]"}).compile(vocabulary)


def test_what_breaks_a_law_is_told_which() -> None:
    with pytest.raises(AssertionError, match="first breaks the law 'candidates may come in any order'"):
        check_scorer(First())
    with pytest.raises(AssertionError, match="relative breaks the law 'a pair is judged alone'"):
        check_utility(Relative())
    with pytest.raises(AssertionError, match=r"halved breaks the law 'pairwise gives \[N, M\] float64'"):
        check_utility(Halved())
    with pytest.raises(AssertionError, match="it accepts 'a'"):
        check_constraint(Deaf(), accepted=["a"], refused=[])
    with pytest.raises(AssertionError, match="it refuses '1'"):
        check_constraint(Deaf(), accepted=["2"], refused=["1"])
