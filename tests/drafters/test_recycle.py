from types import SimpleNamespace

import torch

from decodekit.core.drafts import Draft, DraftRow, Verified
from decodekit.core.random import Stream
from decodekit.core.types import BranchOutputs
from decodekit.drafters.recycle import Recycle


class Model:
    """Any object that can be a key."""


def host(model=None, vocab=20):
    return SimpleNamespace(model=model or Model(), vocab=vocab)


def row(*output):
    return DraftRow(0, [1], list(output), 0, Stream(0, 0, 0))


def teach(state, successors, vocab=20):
    """Let it see forwards in which each token was followed by these, the likeliest first."""
    for token, following in successors.items():
        logits = torch.zeros(1, vocab)
        for place, successor in enumerate(following):
            logits[0, successor] = 10.0 - place
        state.observe([Verified(row(token, following[0]), token, [], Draft(), BranchOutputs(logits))])


def test_a_chain_follows_the_likeliest_successors() -> None:
    state = Recycle(top_k=2).start(host())
    assert not state.propose([row(3)], [4])[0].tokens
    teach(state, {3: [4, 5], 4: [6, 7], 6: [3, 9]})
    [draft] = state.propose([row(3)], [4])
    assert (list(draft.tokens), list(draft.parent_of)) == ([4, 6, 3, 4], [-1, 0, 1, 2])


def test_every_scored_position_teaches_also_behind_a_rejection() -> None:
    state = Recycle(top_k=2).start(host())
    logits = torch.zeros(3, 20)
    for position, successor in enumerate((11, 12, 13)):
        logits[position, successor] = 1
    state.observe([Verified(row(5, 11), 5, [], Draft([8, 9]), BranchOutputs(logits))])
    assert [state.propose([row(token)], [1])[0].tokens for token in (5, 8, 9)] == [[11], [12], [13]]


def test_what_is_learnt_later_replaces_what_was() -> None:
    state = Recycle(top_k=2).start(host())
    teach(state, {3: [4, 5]})
    teach(state, {3: [7, 8]})
    assert state.propose([row(3)], [1])[0].tokens == [7]


def test_a_tree_is_broad_near_its_root_and_has_as_many_leaves_as_allowed() -> None:
    drafter = Recycle(top_k=3, leaves=3)
    state = drafter.start(host())
    teach(state, {token: [token + 1, token + 2, token + 3] for token in range(3, 12)})
    [draft] = state.propose([row(3)], [8])
    assert len(draft.tokens) == 8
    assert len(draft.leaves()) == 3
    draft.check(8, 20, "recycle")
    assert [draft.tokens[child] for child in draft.children(-1)] == [4, 5]
    assert [draft.tokens[child] for child in draft.children(0)] == [5, 6]
    assert draft.depth >= 4


def test_many_rows_get_chains() -> None:
    state = Recycle(top_k=3, leaves=4).start(host())
    teach(state, {token: [token + 1, token + 2, token + 3] for token in range(3, 12)})
    assert all(len(draft.leaves()) == 1 for draft in state.propose([row(3)] * 3, [6] * 3))
    assert any(len(draft.leaves()) == 2 for draft in state.propose([row(3)] * 2, [8] * 2))


def test_the_matrix_stays_with_the_model() -> None:
    model = Model()
    teach(Recycle().start(host(model)), {3: [4, 5]})
    assert Recycle().start(host(model)).propose([row(3)], [1])[0].tokens == [4]
    assert not Recycle().start(host()).propose([row(3)], [1])[0].tokens
    assert not Recycle(top_k=4).start(host(model)).propose([row(3)], [1])[0].tokens
