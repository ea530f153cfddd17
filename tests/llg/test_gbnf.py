import pytest

from decodekit.core.errors import InputError
from decodekit.llg.engine import CompiledGrammar
from decodekit.llg.gbnf import to_lark
from tests.llg.walks import accepts, byte_vocabulary

VOCABULARY = byte_vocabulary()


def judged(gbnf, text):
    return accepts(CompiledGrammar(to_lark(gbnf), VOCABULARY), VOCABULARY, text)


@pytest.mark.parametrize(
    ("gbnf", "good", "bad"),
    [
        # A greedy cut into "listen" would leave no way to "listed".
        (
            'root ::= stem suffix\nstem ::= "list" | "listen"\nsuffix ::= "ed" | "ened"',
            ["listed", "listened", "listenened"],
            ["list", "listen", "listenedd"],
        ),
        ('root ::= [a-z]* "az"', ["az", "azaz", "bazaz"], ["a", "azb"]),
        ('root ::= name " = " name\nname ::= [a-z]+ | "pass="', ["a = b", "pass= = x"], ["pass=", "a =b"]),
        ('root ::= "" | "(" root ")" root', ["", "(())()"], ["(", ")("]),
        ('root ::= ("a" | "b"){2,3} [^a-c\\n]?', ["ab", "abbz", "aaa日"], ["a", "abbb", "abc"]),
        ("root ::= [\\u65e5-\\u6900]+ .\n", ["日本x", "日😀"], ["x日"]),
        ('# a comment\nroot ::= a |\n  b  # another\na ::= "x"\nb ::= ( "y"\n "z" )', ["x", "yz"], ["y", "xyz"]),
        ('root ::= "\\x41\\"\\\\" ', ['A"\\'], ["A"]),
    ],
)
def test_the_language_stays_what_it_is(gbnf, good, bad) -> None:
    assert [text for text in good if not judged(gbnf, text)] == []
    assert [text for text in bad if judged(gbnf, text)] == []


def test_regular_parts_are_terminals_where_that_is_safe() -> None:
    lark = to_lark('root ::= "[" word ("," word)* "]"\nword ::= [a-z]+ | "(" root ")"')
    assert "[\\x{61}-\\x{7a}]){1,}" in lark


@pytest.mark.parametrize(
    ("gbnf", "message"),
    [
        ("start ::= x", "rule 'root'"),
        ("root ::= x y", "no rule is named x, y"),
        ('root ::= ("a"', "line 1: expected a closing"),
        ('root ::= "a"{3,1}', "in order"),
        ("root ::= @", "line 1: expected a rule"),
    ],
)
def test_faults_are_told(gbnf, message) -> None:
    with pytest.raises(InputError, match=message):
        to_lark(gbnf)
