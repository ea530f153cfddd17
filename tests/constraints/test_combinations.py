"""all_of, any_of, none_of and concat, of regular constraints and across engines."""

from typing import Literal

import pytest
import torch

from decodekit.constraints.all_of import AllOf
from decodekit.constraints.any_of import AnyOf
from decodekit.constraints.concat import Concat
from decodekit.constraints.none_of import NoneOf
from decodekit.constraints.regex import Regex
from decodekit.core.constraint import mask_tokens, mask_words
from decodekit.core.errors import InputError, RowError, UnsupportedConstraint
from decodekit.core.protocols import Constraint
from decodekit.core.registry import create
from decodekit.core.vocabulary import Vocabulary
from decodekit.testing import tiny_tokenizer

VOCABULARY = Vocabulary((None, b"a", b"b", b"c", b"ab", b"bc", b"x"), False, (0,), None)


class Foreign(Constraint):
    """A regex as another engine would bring it: without an automaton to combine."""

    kind: Literal["foreign"] = "foreign"
    pattern: str

    def compile(self, vocabulary):
        return Regex(pattern=self.pattern).compile(vocabulary)


def legal(state):
    out = torch.full((2, mask_words(VOCABULARY.width)), -1, dtype=torch.int32)
    state.mask(out, 1)
    assert (out[0] == -1).all()
    return mask_tokens(out[1])


def texts(state, most=6):
    """Every text that the masks let through, each token in the mask."""
    found = {""} if state.is_accepting() else set()
    assert (0 in legal(state)) == state.is_accepting()
    for token in legal(state):
        if token and most:
            ahead = state.fork()
            ahead.advance(token)
            found |= {VOCABULARY.tokens[token].decode() + rest for rest in texts(ahead, most - 1)}
    return found


PARTS = ("a?b?c?", "(ab|bc|x)+|a", "[^x]*")


@pytest.mark.parametrize("kind", ["regex", "foreign"])
def test_all_and_any_across_engines_have_the_texts_of_sets(kind):
    other = Regex if kind == "regex" else Foreign
    each = [texts(Regex(pattern=pattern).compile(VOCABULARY).start(), 4) for pattern in PARTS]
    parts = (Regex(pattern=PARTS[0]), other(pattern=PARTS[1]), Regex(pattern=PARTS[2]))
    assert texts(AllOf(constraints=parts).compile(VOCABULARY).start(), 4) == each[0] & each[1] & each[2]
    assert texts(AnyOf(constraints=parts).compile(VOCABULARY).start(), 3) >= each[0]
    pair = AnyOf(constraints=parts[:2])
    expected = {text for text in each[0] | each[1] if len(text) < 4}
    assert {text for text in texts(pair.compile(VOCABULARY).start(), 4) if len(text) < 4} == expected


@pytest.mark.parametrize("combination", [AllOf, AnyOf])
def test_states_across_engines_roll_back_and_fork(combination):
    parts = (Regex(pattern="(a|b)*c"), Foreign(pattern="(ab)*[bc]"))
    state = combination(constraints=parts).compile(VOCABULARY).start()
    state.advance(4)
    masks = [legal(state)]
    state.advance(1)
    fork = state.fork()
    state.advance(2)
    state.rollback(2)
    assert legal(state) == masks[0]
    fork.advance(2)
    fork.advance(3)
    assert fork.is_accepting()
    assert not state.is_accepting()
    with pytest.raises(RowError):
        state.advance(6)
    assert legal(state) == masks[0]
    with pytest.raises(InputError, match="cannot take back"):
        state.rollback(2)


def test_dead_ends_of_other_engines_are_seen_a_few_tokens_ahead():
    # Behind "a" both go on, but never to the same end.
    state = AllOf(constraints=(Foreign(pattern="abb|x"), Foreign(pattern="abc|x"))).compile(VOCABULARY).start()
    assert legal(state) == [6]
    assert state.min_tokens_to_accept(5) == 1
    assert state.min_tokens_to_accept(0) is None


def test_what_is_forced_on_one_member_is_forced():
    vocabulary = Vocabulary.of(tiny_tokenizer())
    both = AllOf(constraints=(Foreign(pattern="the-(cat|dog)"), Regex(pattern="[a-z-]*")))
    forced = both.compile(vocabulary).start().forced_tokens()
    assert b"".join(vocabulary.tokens[token] for token in forced) == b"the-"
    either = AnyOf(constraints=(Foreign(pattern="the cat"), Regex(pattern="the cow")))
    forced = either.compile(vocabulary).start().forced_tokens()
    assert b"".join(vocabulary.tokens[token] for token in forced) == b"the c"


def test_recipes_nest_them(accepts):
    spec = {
        "kind": "all_of",
        "constraints": [
            {
                "kind": "concat",
                "constraints": [{"kind": "choice", "choices": ["yes", "no"]}, {"kind": "regex", "pattern": ".*"}],
            },
            {"kind": "none_of", "constraints": [{"kind": "regex", "pattern": ".*bad.*"}]},
        ],
    }
    assert create("constraints", spec).constraints[0].kind == "concat"
    assert accepts(spec, "yes, good")
    assert not accepts(spec, "yes, bad")
    assert not accepts(spec, "maybe")


def test_texts_of_members_are_resolved():
    class Late(Foreign):
        def resolve(self, tokenizer):
            return Regex(pattern=tokenizer)

    resolved = AnyOf(constraints=(Late(pattern="b"), Regex(pattern="c"))).resolve("a")
    assert texts(resolved.compile(VOCABULARY).start()) == {"a", "c"}


def test_look_around_of_a_part_sees_that_part_alone(accepts):
    parts = (Regex(pattern="a(?!b)"), Regex(pattern="^b$"), Regex(pattern="c"))
    assert accepts(Concat(constraints=parts), "abc")


def test_none_of_is_every_other_text(accepts):
    assert accepts(NoneOf(constraints=(Regex(pattern="a+"), Regex(pattern="b+"))), "ab\n😀")
    assert not accepts(NoneOf(constraints=(Regex(pattern="a+"), Regex(pattern="b+"))), "bb")


@pytest.mark.parametrize("combination", [NoneOf, Concat])
def test_refuses_parts_that_have_no_automaton(combination):
    with pytest.raises(UnsupportedConstraint, match="'foreign' is none") as raised:
        combination(constraints=(Regex(pattern="a"), Foreign(pattern="a"))).compile(VOCABULARY)
    assert raised.value.keywords == ("foreign",)


def test_refuses_what_no_text_satisfies():
    with pytest.raises(InputError, match="no text"):
        AllOf(constraints=(Regex(pattern="a"), Regex(pattern="b"))).compile(VOCABULARY)
