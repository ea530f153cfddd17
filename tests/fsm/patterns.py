"""Random regexes and texts over a few characters, one of every UTF-8 length among them."""

from hypothesis import strategies as st

from decodekit.fsm.automaton import DEAD, Dfa

CHARACTERS = "aAb1_ \né中😀"


def _joined(parts):
    return "".join(parts)


plain_atoms = st.sampled_from([*"aAb1_é中😀", r"\n", " ", ".", "[^a]", "[a-b]", "[é-😀]", r"[^\n]"])
atoms = st.one_of(
    plain_atoms,
    st.sampled_from([r"\w", r"\W", r"\d", r"\s", "[^a]", "[a-b]", "[^a\n]", "[é-😀]", r"[\d_]", r"[^\W1]"]),
)
counts = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}", "{2,}", "{0}", "{,1}"])


def _regexes(atoms, anchors):
    def larger(inner):
        group = inner.map("(?:{})".format)
        return st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(_joined),
            st.lists(inner, min_size=1, max_size=3).map("|".join).map("({})".format),
            st.builds("{}{}".format, st.one_of(atoms, group), counts),
            st.builds("(?{}{})".format, st.sampled_from("=!"), inner),
            st.builds("(?{}:{})".format, st.sampled_from(["i", "s", "m", "a"]), inner),
        )

    behind = st.builds("(?<{}{})".format, st.sampled_from("=!"), st.lists(atoms, min_size=1, max_size=2).map(_joined))
    return st.recursive(st.one_of(atoms, st.sampled_from(anchors), behind), larger, max_leaves=6)


regexes = _regexes(atoms, ["^", "$", r"\b", r"\B", r"\A", r"\Z"])
# Without the large classes, whose combinations take many states.
small_regexes = _regexes(plain_atoms, ["^", "$", r"(?a:\b)", r"(?a:\B)", r"\Z"])
# Without anchors and look-around as well, so that combinations can be told by re.
plain_regexes = st.recursive(
    plain_atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(_joined),
        st.lists(inner, min_size=1, max_size=3).map("|".join).map("({})".format),
        st.builds("(?:{}){}".format, inner, counts),
    ),
    max_leaves=5,
)
texts = st.text(alphabet=CHARACTERS, max_size=5)


def has(dfa: Dfa, text: str | bytes) -> bool:
    """Whether an automaton accepts a text; checks on the way that it never calls a state dead that is not."""
    state, dead = Dfa.start, not dfa.is_live(Dfa.start)
    for byte in text.encode() if isinstance(text, str) else text:
        state = dfa.step(state, byte)
        dead |= not dfa.is_live(state)
    assert state != DEAD or dead
    assert not (dead and dfa.accepting[state])
    return dfa.accepting[state]
