import torch

from decodekit.core.drafts import DraftRow, Verified
from decodekit.core.random import Stream
from decodekit.core.types import BranchOutputs
from decodekit.drafters.lookahead import Lookahead

VOCAB = 30


def successor(token):
    """A model that knows one token of context."""
    return (3 * token + 1) % VOCAB


def row(*output, number=0):
    return DraftRow(number, [7, 8, 9], list(output), 0, Stream(0, 0, 0))


def verified(output, draft):
    """What the model makes of a draft after this output, and the output then."""
    known = [output[-1], *draft.tokens]
    logits = torch.nn.functional.one_hot(torch.tensor([successor(token) for token in known]), VOCAB).float()
    accepted, last = [], output[-1]
    while True:
        node = accepted[-1] if accepted else -1
        last = successor(last)
        output = [*output, last]
        agreed = [child for child in draft.children(node) if draft.tokens[child] == last]
        if not agreed:
            return Verified(row(*output), known[0], accepted, draft, BranchOutputs(logits)), output
        accepted.append(agreed[0])


def test_the_lookahead_branch_is_a_chain_with_a_branch_a_column() -> None:
    state = Lookahead(window=3, ngram=4).start(None)
    [draft] = state.propose([row(5)], [32])
    draft.check(32, VOCAB, "lookahead")
    # Three levels of three guesses; nothing is known yet to be verified.
    assert len(draft.tokens) == 9
    oldest = [0, 3, 6]
    assert [draft.parent_of[node] for node in oldest] == [-1, 0, 3]
    assert [draft.parent_of[node] for node in (1, 4, 7)] == oldest
    assert len(draft.leaves()) == 3


def test_guesses_become_ngrams_that_are_verified() -> None:
    state = Lookahead(window=3, ngram=3).start(None)
    output, accepted = [5], 0
    for _ in range(12):
        [draft] = state.propose([row(*output)], [32])
        draft.check(32, VOCAB, "lookahead")
        told, output = verified(output, draft)
        state.observe([told])
        accepted += len(told.accepted)
    # This model's guesses converge, so that drafts come true.
    assert accepted >= 6


def test_a_budget_leaves_guesses_out_before_ngrams() -> None:
    state = Lookahead(window=3, ngram=3).start(None)
    output = [5]
    for _ in range(6):
        told, output = verified(output, state.propose([row(*output)], [32])[0])
        state.observe([told])
    whole = state.propose([row(*output)], [32])[0]
    [cut] = state.propose([row(*output)], [2])
    assert list(cut.tokens) == list(whole.tokens[:2])
    told, _ = verified(output, cut)
    state.observe([told])
    assert state.propose([row(*output)], [32])[0].tokens


def test_forks_go_on_apart() -> None:
    state = Lookahead(window=2, ngram=3).start(None)
    told, output = verified([5], state.propose([row(5)], [32])[0])
    state.observe([told])
    state.fork({1: 0})
    first = state.propose([row(*output), row(*output, number=1)], [32, 32])
    assert list(first[0].tokens) == list(first[1].tokens)
    told, longer = verified(output, first[0])
    state.observe([told])
    again = state.propose([row(*longer), row(*output, number=1)], [32, 32])
    assert list(again[1].tokens) == list(first[1].tokens)
    state.release([0, 1])
