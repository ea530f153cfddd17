import random

import pytest

from decodekit.core.drafts import DraftRow, confidence
from decodekit.core.random import Stream
from decodekit.drafters.ngram import Ngram


def proposals(drafter, prompt, output, budget=4):
    """What is proposed while the output grows, token by token."""
    state = drafter.start(None)
    return [
        state.propose([DraftRow(0, prompt, output[:count], 0, Stream(0, 0, 0))], [budget])[0]
        for count in range(1, len(output) + 1)
    ]


def expected(ids, most, least, budget):
    """By definition: what followed the latest earlier place of the longest match, repeated where it ends."""
    for size in range(min(most, len(ids) - 1), least - 1, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == ids[-size:]:
                follow, period = start + size, len(ids) - start - size
                return [ids[follow + step % period] for step in range(budget)]
    return []


@pytest.mark.parametrize(("least", "most"), [(1, 3), (2, 2), (2, 5), (1, 1)])
@pytest.mark.parametrize("symbols", [2, 5])
def test_proposals_are_those_of_the_definition(least, most, symbols) -> None:
    rng = random.Random(symbols)
    prompt, output = ([rng.randrange(symbols) for _ in range(30)] for _ in range(2))
    found = proposals(Ngram(min_ngram=least, max_ngram=most), prompt, output)
    for count, draft in enumerate(found, start=1):
        assert list(draft.tokens) == expected([*prompt, *output[:count]], most, least, 4)


def test_a_longer_match_goes_before_a_later_one() -> None:
    [draft] = proposals(Ngram(), [1, 2, 3, 7, 9, 3, 8, 1, 2], [3], budget=2)
    assert (list(draft.tokens), list(draft.confidence)) == ([7, 9], [confidence(3), confidence(4)])


def test_nothing_repeats() -> None:
    [draft] = proposals(Ngram(), [1, 2, 3], [4])
    assert not draft.tokens


def test_a_repetition_is_continued_beyond_the_text() -> None:
    [draft] = proposals(Ngram(), [1, 2, 1, 2], [1], budget=5)
    assert list(draft.tokens) == [2, 1, 2, 1, 2]


def test_rows_keep_apart_and_are_let_go() -> None:
    state = Ngram().start(None)
    rows = [DraftRow(0, [1, 2, 1], [2], 0, Stream(0, 0, 0)), DraftRow(1, [1, 3, 1], [3], 1, Stream(0, 0, 0))]
    assert [list(draft.tokens) for draft in state.propose(rows, [1, 1])] == [[1], [1]]
    state.release([0])
    fresh = DraftRow(0, [5, 6, 5], [6], 2, Stream(0, 0, 0))
    assert list(state.propose([fresh], [1])[0].tokens) == [5]


def test_a_range_that_is_empty_is_refused() -> None:
    with pytest.raises(ValueError, match="min_ngram 4 is more than max_ngram 3"):
        Ngram(min_ngram=4)
