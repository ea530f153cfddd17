import pytest
from pydantic import TypeAdapter, ValidationError

from decodekit.strategies.self_consistency.extractors import AnyExtractor, canonical

EXTRACTOR = TypeAdapter(AnyExtractor)


@pytest.mark.parametrize("text", ["1,000", "1000", "1000.0", "1e3", "1000.", "$1,000.00", "+1000", " 1000 "])
def test_equal_numbers_are_one_answer(text: str) -> None:
    assert canonical(text.strip(".")) == "1000"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("0", "0"), ("-0.0", "0"), ("0.50", "0.5"), ("-3", "-3"), ("−3", "-3"), ("1e-3", "0.001"), ("1e400", "1E+400"),
        ("12345678901234567890123456789012345", "12345678901234567890123456789012345"),
        ("1e99999999999999999999999", "1e99999999999999999999999"), ("x  +\ny", "x + y"), ("", None), ("  ", None),
    ],
)  # fmt: skip
def test_canonical(text: str, answer: str | None) -> None:
    assert canonical(text) == answer


@pytest.mark.parametrize(
    ("spec", "text", "answer"),
    [
        ("last_number", "so 3 + 4 = 7.", "7"),
        ("last_number", "it costs $1,234.50 a day", "1234.5"),
        ("last_number", "10-3", "3"),
        ("last_number", "it is -3", "-3"),
        ("last_number", "(5)-2", "2"),
        ("last_number", "3, 4,5", "5"),
        ("last_number", "1.5e2 in all", "150"),
        ("last_number", "none", None),
        ("boxed", r"\boxed{1} and \boxed{\frac{1}{2}} so", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1,000}", "1000"),
        ("boxed", r"\boxed{1", None),
        ("boxed", "1}", None),
        ({"kind": "regex", "pattern": r"= (\w+)"}, "a = x, b = y", "y"),
        ({"kind": "regex", "pattern": r"\d\d"}, "12 34 5", "34"),
        ({"kind": "regex", "pattern": r"(a)|b"}, "a b", None),
        ({"kind": "regex", "pattern": "z"}, "abc", None),
        ("choice", "A good one. The answer is (C).", "C"),
        ("choice", "Answer: **B**", "B"),
        ("choice", "(A) or (D), I say (D)", "D"),
        ("choice", "D.", "D"),
        ("choice", "A dog ran", None),
        ({"kind": "choice", "letters": "XY"}, "the answer is C, or: answer Y", "Y"),
        ({"kind": "json_path", "path": "answer"}, 'first {"answer": 1} then {"answer": 2.0}!', "2"),
        ({"kind": "json_path", "path": "a.1.b"}, '{"a": [0, {"b": "x"}]}', "x"),
        ({"kind": "json_path", "path": "answer"}, '{"answer": 3} {"other": 1} {broken', "3"),
        ({"kind": "json_path", "path": "a"}, '{"a": {"y": 1, "x": 2}}', '{"x": 2, "y": 1}'),
        ({"kind": "json_path", "path": "a"}, "[" * 100_000, None),
        ({"kind": "json_path", "path": "a"}, "[" * 100_000 + ' no: {"a": 1}', "1"),
        (lambda text: text[:1] or None, "xyz", "x"),
        (lambda text: text[:1] or None, "", None),
        (len, "abc", "3"),
    ],
)  # fmt: skip
def test_finds(spec, text: str, answer: str | None) -> None:
    assert EXTRACTOR.validate_python(spec)(text) == answer


@pytest.mark.parametrize(
    "spec", ["last_letter", {"kind": "regex"}, {"kind": "regex", "pattern": "("}, {"kind": "boxed", "x": 1}, 3]
)
def test_a_wrong_extractor_is_refused(spec) -> None:
    with pytest.raises(ValidationError):
        EXTRACTOR.validate_python(spec)
