from collections.abc import Sequence
from typing import Literal

import pytest

from decodekit import Draft, Drafter, DraftHost, DraftRow, DraftState
from decodekit.core import registry
from decodekit.testing import check_drafter


@pytest.mark.parametrize("kind", ["ngram", {"kind": "recycle", "leaves": 2}])
def test_our_drafters_obey(kind) -> None:
    drafter = registry.create("drafters", kind if isinstance(kind, dict) else {"kind": kind})
    assert check_drafter(drafter, families=("dense",)) > 0


class Careless(Drafter):
    """Proposes ids that there are not."""

    kind: Literal["careless"] = "careless"

    def start(self, host: DraftHost) -> DraftState:
        return _State()


class _State(DraftState):
    def propose(self, rows: Sequence[DraftRow], budgets: Sequence[int]) -> Sequence[Draft]:
        return [Draft([10_000][:budget]) for budget in budgets]


def test_one_that_fails_is_told_so() -> None:
    with pytest.raises(AssertionError, match=r"careless breaks the law 'it never fails'.*below 97"):
        check_drafter(Careless(), families=("dense",))
