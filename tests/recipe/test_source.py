from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decodekit.core.errors import RecipeError
from decodekit.recipe import source as module
from decodekit.recipe.source import MAX_BYTES, Source, from_python, parse

SOURCE = Source("a.yaml", Path("/recipes"))


@pytest.fixture(params=["CSafeLoader", "SafeLoader"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both parsers of PyYAML: wheels have libyaml, some builds have not."""
    monkeypatch.setattr(module, "_LOADER", getattr(yaml, request.param))
    return str(request.param)


def refusal(text: str | bytes, **options: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        parse(text, SOURCE, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("loader")
class TestScalars:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("true", True),
            ("False", False),
            ("null", None),
            ("~", None),
            ("no", "no"),
            ("on", "on"),
            ("yes", "yes"),
            ("y", "y"),
            ("12", 12),
            ("-3", -3),
            ("010", 10),
            ("0o17", 15),
            ("0x1F", 31),
            ("1_000", "1_000"),
            ("12:30", "12:30"),
            ("2024-01-01", "2024-01-01"),
            ("1e-3", 1e-3),
            ("1E5", 1e5),
            (".5", 0.5),
            ("1.", 1.0),
            ("-0.25", -0.25),
            ("18446744073709551615", 2**64 - 1),
            ("'12'", "12"),
            ('"true"', "true"),
            ('"\\u00e9\\n"', "é\n"),
            ("nan", "nan"),
            ("4GiB", "4GiB"),
        ],
    )
    def test_core_schema(self, text: str, value: object) -> None:
        read = parse(f"a: {text}", SOURCE).plain()["a"]
        assert read == value
        assert isinstance(read, type(value))

    @pytest.mark.parametrize("text", [".nan", ".NaN", ".inf", "-.INF", "1e999", "9" * 65, "0x" + "f" * 65])
    def test_numbers_that_are_none(self, text: str) -> None:
        assert refusal(f"a: {text}").startswith("a.yaml:1:4: ")


@pytest.mark.usefixtures("loader")
class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "start"),
        [
            ("a: 1\nb: 2\na: 3\n", "a.yaml:3:1: duplicate key 'a': line 1 has it already"),
            ("a:\n  - x: 1\n    x: 2", "a.yaml:3:5: duplicate key 'x': line 2 has it already"),
            ("0x1: a\n1: b", "a.yaml:2:1: duplicate key 1: line 1"),
            (
                "a: !!python/object/apply:os.system [ls]",
                "a.yaml:1:4: tag 'tag:yaml.org,2002:python/object/apply:os.system'",
            ),
            ("a: !mine {b: 1}", "a.yaml:1:4: tag '!mine'"),
            ("a: !!str 1", "a.yaml:1:4: tag"),
            ("a: 1\n---\nb: 2", "a.yaml:2:1: a second document"),
            ("", "a.yaml:1:1: empty: a recipe is a mapping"),
            ("# only a comment\n", "a.yaml:1:1: empty"),
            ("? [1]\n: 2", "a.yaml:1:3: a key is a name or a whole number, got a collection"),
            ("true: 1", "a.yaml:1:1: a key is a name or a whole number, got true"),
            ("a: *b", "a.yaml:1:4: alias *b has no anchor"),
            ("a: &a [1, *a]", "a.yaml:1:11: alias *a stands inside its own anchor"),
            ("a: 1\n\tb: 2", "a.yaml:2:1: "),
            ("a: {b: [1, 2\n\n", "a.yaml:1:13: while parsing a flow sequence that begins at line 1, "),
            ("a: 'x", "a.yaml:1:6: while scanning a quoted scalar that begins at line 1, "),
            ("strategy: {kind: sample\nrules: []", "a.yaml:2:6: while parsing a flow mapping that begins at line 1, "),
            ("a: b: c", "a.yaml:1:5: "),
            ("a: \x07", "a.yaml:1:4: control character '\\x07'"),
            ("é: 1\na: \x00", "a.yaml:2:4: control character '\\x00'"),
            (b"a: 1\nb\xc3\xa9: \xff", "a.yaml:2:5: not UTF-8 (byte 0xff)"),
            (b"\xef\xbb\xbfa: \xff", "a.yaml:1:4: not UTF-8 (byte 0xff)"),
            ("a: 1".encode("utf-16"), "a.yaml:1:1: not UTF-8 (byte 0xff)"),
        ],
    )
    def test_position_and_message(self, text: str | bytes, start: str) -> None:
        assert refusal(text).startswith(start)

    def test_tab(self) -> None:
        assert "use spaces" in refusal("a:\n\tb: 2")

    def test_truncated_names_where_it_began(self) -> None:
        assert "begins at line 2" in refusal("a: 1\nb: [1,\n  2\n")

    def test_byte_order_mark(self) -> None:
        node = parse(b"\xef\xbb\xbfa: 1", SOURCE)
        assert node.plain() == {"a": 1}
        assert str(node.value["a"].key_origin) == "a.yaml:1:1"


@pytest.mark.usefixtures("loader")
def test_positions() -> None:
    root = parse("rules:\n  - {kind: top_p, p: 0.9}\n  - kind: é\n    'long key':   [1, 2]\n", SOURCE)
    rules = root.value["rules"]
    assert str(rules.key_origin) == "a.yaml:1:1"
    first, second = rules.node.value
    assert str(first.origin) == "a.yaml:2:5"
    assert str(first.value["p"].key_origin) == "a.yaml:2:19"
    assert str(first.value["p"].node.origin) == "a.yaml:2:22"
    assert str(second.value["long key"].key_origin) == "a.yaml:4:5"
    assert str(second.value["long key"].node.value[1].origin) == "a.yaml:4:23"


def test_aliases() -> None:
    assert parse("a: &x {b: 1}\nc: *x", SOURCE).plain() == {"a": {"b": 1}, "c": {"b": 1}}


class TestBombs:
    """Each is refused in well under the two seconds that a hostile text may take."""

    @pytest.fixture(autouse=True)
    def _quick(self) -> Any:
        start = time.perf_counter()
        yield
        assert time.perf_counter() - start < 2

    def test_billion_laughs(self) -> None:
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
        assert "values (aliases count" in refusal("\n".join(lines))

    def test_many_aliases(self) -> None:
        assert "more than 100 aliases" in refusal("a: &a 1\nb: [" + "*a, " * 101 + "]")

    @pytest.mark.parametrize("text", ["[" * 500_000, "{a: " * 100_000, "- " * 5_000 + "x"])
    def test_depth(self, text: str) -> None:
        assert "nest" in refusal(text)

    def test_depth_of_json(self) -> None:
        assert "nested more than 100 deep" in refusal("[" * 500_000 + "]" * 500_000, is_json=True)
        assert "nested more than 100 deep" in refusal("[" * 101 + "1" + "]" * 101, is_json=True)

    def test_values(self) -> None:
        assert "more than 20000 values" in refusal("a: [" + "1," * 500_000 + "]")

    def test_size(self) -> None:
        assert parse(b"a: 1 #" + b"x" * (MAX_BYTES - 6), SOURCE).plain() == {"a": 1}
        assert refusal(b"a: 1 #" + b"x" * (MAX_BYTES - 5)).startswith("a.yaml:1:1: larger than 1 MiB")

    def test_a_long_text_makes_a_short_message(self) -> None:
        assert len(refusal("a" * 1000 + ": 1\n" + "a" * 1000 + ": 1")) < 200


class TestJson:
    def test_values_and_positions(self) -> None:
        text = json.dumps({"a": [1, 2.5, True, None], "b": {"c": 'é\t\U0001f600 \\ " /'}}, indent="\t")
        root = parse(text, SOURCE, is_json=True)
        assert root.plain() == json.loads(text)
        assert str(root.value["a"].node.value[1].origin) == "a.yaml:4:3"
        assert str(root.value["b"].node.value["c"].key_origin) == "a.yaml:9:3"

    @pytest.mark.parametrize(
        ("text", "start"),
        [
            ('{"a": 1, "a": 2}', "a.yaml:1:10: duplicate key 'a'"),
            ('{"a": 1,\n "b": }', "a.yaml:2:7: not well-formed JSON"),
            ('{"a": [1, 2', "a.yaml:1:12: not well-formed JSON"),
            ('{"a": NaN}', "a.yaml:1:7: .nan is no number"),
            ('{"a": -Infinity}', "a.yaml:1:7: -.inf is no number"),
            ('{"a": 1} x', "a.yaml:1:10: not well-formed JSON"),
            ('{"a": "\\ud800"}', "a.yaml:1:7: half of a surrogate pair"),
            ("", "a.yaml:1:1: not well-formed JSON"),
            ('{"a": ' + "9" * 5000 + "}", "a.yaml:1:7: a number of 5000 characters"),
        ],
    )
    def test_refusals(self, text: str, start: str) -> None:
        assert refusal(text, is_json=True).startswith(start)


class TestPython:
    def test_tuples_and_paths(self) -> None:
        assert from_python({"a": (1, 2), "b": Path("x/y")}, SOURCE).plain() == {"a": [1, 2], "b": "x/y"}

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"a": [object()]}, "a.0: object is no plain data"),
            ({"a": {"b": float("inf")}}, "a.b: inf is no number"),
            ({"a": {True: 1}}, "a: a key is a name or a whole number, got true"),
            ({"a": SimpleNamespace()}, "a: SimpleNamespace is no plain data"),
        ],
    )
    def test_refusals(self, data: Any, message: str) -> None:
        with pytest.raises(RecipeError, match=message):
            from_python(data, SOURCE)

    def test_cycle(self) -> None:
        data: dict[str, Any] = {}
        data["a"] = data
        with pytest.raises(RecipeError, match="nested more than"):
            from_python(data, SOURCE)


VALID = (
    "extends: b.yaml\nstrategy: &s {kind: dola, layers: [1, 2]}\nrules:\n  - kind: top_p\n    p: 0.9 # note\n"
    "  - *s\ngeneration: {stop_strings: ['a', \"\\u00e9\"], seed: 0x1f}\n"
)
TOKENS = [*":-[]{},&*!|>'\"%@`#?~ \n\t\r\\\x00\ufeffé0", "---", "...", "<<", "!!", "a: ", "- "]


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = VALID
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 6)))
        text = text[:start] + draw(st.sampled_from(["", *TOKENS])) + text[end:]
    return text


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    text=st.one_of(
        st.binary(max_size=60), st.text(max_size=60), st.lists(st.sampled_from(TOKENS)).map("".join), mutated()
    )
)
@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.usefixtures("loader")
def test_any_text_is_read_or_refused(text: str | bytes, is_json: bool) -> None:
    try:
        root = parse(text, SOURCE, is_json=is_json)
    except RecipeError as error:
        message = str(error)
        assert message.startswith("a.yaml:"), message
        assert "\n" not in message, message
    else:
        json.dumps(root.plain(), allow_nan=False)
