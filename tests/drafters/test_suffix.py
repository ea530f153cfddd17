import random
from types import SimpleNamespace

import pytest

from decodekit.core.drafts import DraftRow, confidence
from decodekit.core.random import Stream
from decodekit.drafters.suffix import Automaton, Corpus, Suffix


class Model:
    """Any object that can be a key."""


def host(model):
    return SimpleNamespace(model=model, vocab=50)


def row(prompt, output, number=0):
    return DraftRow(number, prompt, output, number, Stream(0, 0, 0))


def occurrences(text, part):
    return [place for place in range(len(text) - len(part) + 1) if text[place : place + len(part)] == part]


@pytest.mark.parametrize("symbols", [2, 4])
def test_the_automaton_knows_the_longest_repeated_suffix_and_what_followed_most_often(symbols) -> None:
    rng = random.Random(symbols)
    text, automaton = [], Automaton()
    for _ in range(40):
        text.append(rng.randrange(symbols))
        automaton.extend(text[-1])
        longest = max((n for n in range(1, len(text)) if len(occurrences(text, text[-n:])) > 1), default=0)
        state, match = automaton.repeated()
        assert match == longest
        if not match:
            continue
        token, *_ = automaton.chances(state, match, 3.0)
        follows = [text[place + match] for place in occurrences(text, text[-match:]) if place + match < len(text)]
        assert follows.count(token) == max(map(follows.count, follows))


def test_the_walk_finds_the_longest_suffix_of_another_text() -> None:
    rng = random.Random(1)
    known, automaton = [], Automaton()
    place, text = (0, 0), []
    for _ in range(60):
        # Both grow: states split under the walk.
        known.append(rng.randrange(3))
        automaton.extend(known[-1])
        text.append(rng.randrange(3))
        before = known[:]
        place = automaton.walk(*place, text[-1])
        reachable = max((n for n in range(1, len(text) + 1) if occurrences(before, text[-n:])), default=0)
        assert place[1] <= reachable
        if place[1]:
            assert occurrences(before, text[-place[1] :])
    fresh = (0, 0)
    for token in text:
        fresh = automaton.walk(*fresh, token)
    assert fresh[1] == max((n for n in range(1, len(text) + 1) if occurrences(known, text[-n:])), default=0)


def test_confidence_grows_with_the_match_and_with_how_often_it_went_on_so() -> None:
    state = Suffix(max_cached_tokens=0).start(host(Model()))
    [draft] = state.propose([row([1, 2, 3, 4, 5, 6, 7, 9], [1])], [4])
    assert list(draft.tokens) == [2, 3, 4, 5]
    assert list(draft.confidence) == [confidence(match) for match in (1, 2, 3, 4)]
    [draft] = state.propose([row([5, 1, 7, 1, 7, 1, 8, 9], [6, 1], 1)], [2])
    assert list(draft.tokens) == [7, 1]
    assert list(draft.confidence) == [confidence(1, 2, 3), confidence(2, 2, 2)]
    assert confidence(1, 1, 1) < confidence(2, 1, 1) < confidence(2, 3, 3) < 1


def test_what_the_longest_suffix_leaves_open_a_shorter_one_says() -> None:
    automaton = Automaton()
    for token in [1, 2, 9, *[5, 2, 7] * 4, 1, 2]:
        automaton.extend(token)
    state, match = automaton.repeated()
    assert match == 2
    chances = automaton.chances(state, match, 3.0)
    rest = 1 - confidence(2)
    assert chances == pytest.approx({9: confidence(2) + rest * confidence(1, 1, 5), 7: rest * confidence(1, 4, 5)})
    assert list(chances) == [9, 7]


def test_of_its_own_past_and_earlier_texts_the_likelier_is_continued() -> None:
    model = Model()
    first = Suffix().start(host(model))
    first.propose([row([1, 2, 3, 4, 5, 6], [7])], [4])
    first.close()
    state = Suffix().start(host(model))
    for own, expected in (([3, 9, 1, 2, 3], 4), ([9, 2, 3, 8, 2, 3], 8)):
        [draft] = state.propose([row([0], own, len(own))], [1])
        assert list(draft.tokens) == [expected]


def test_the_most_frequent_continuation_is_taken() -> None:
    state = Suffix(max_cached_tokens=0).start(host(Model()))
    [draft] = state.propose([row([1, 2, 7, 1, 2, 7, 1, 2, 8, 5, 1], [2])], [1])
    assert list(draft.tokens) == [7]


def test_earlier_requests_of_the_same_model_are_known() -> None:
    model, other = Model(), Model()
    first = Suffix().start(host(model))
    first.propose([row([1, 2, 3, 4], [5, 6, 7])], [4])
    first.release([0])
    for own, expected in ((model, [6, 7]), (other, [])):
        state = Suffix().start(host(own))
        [draft] = state.propose([row([20, 21], [5])], [4])
        assert list(draft.tokens) == expected
    [draft] = Suffix(max_cached_tokens=0).start(host(model)).propose([row([20, 21], [5])], [4])
    assert not draft.tokens


def test_texts_do_not_run_into_each_other() -> None:
    model = Model()
    for text in ([1, 2, 3], [7, 8, 9]):
        state = Suffix().start(host(model))
        state.propose([row(text[:2], text[2:])], [4])
        state.close()
    [draft] = Suffix().start(host(model)).propose([row([2], [3])], [4])
    assert not draft.tokens


def test_the_memory_is_bounded_and_the_oldest_is_forgotten() -> None:
    corpus = Corpus()
    for number in range(50):
        corpus.add([number] * 10, 100)
        assert sum(automaton.size for automaton in corpus.automata) <= 2 * (50 + 10)
    assert all(automaton.walk(0, 0, 0) == (0, 0) for automaton in corpus.automata)
    assert corpus.automata[-1].walk(0, 0, 49)[1] == 1
    corpus.add(list(range(1000)), 100)
    assert corpus.automata[-1].size <= 60


def test_what_came_after_the_last_look_is_remembered() -> None:
    model, output = Model(), [1, 2]
    first = Suffix().start(host(model))
    first.propose([row([0], output)], [0])
    output += [3, 4, 5, 6]
    first.close()
    [draft] = Suffix().start(host(model)).propose([row([9], [2, 3, 4])], [2])
    assert list(draft.tokens) == [5, 6]
