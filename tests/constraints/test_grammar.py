import ast
import csv
import datetime
import email.headerregistry
import io
import ipaddress
import json
import random
import re
import sqlite3
import urllib.parse
import uuid
import warnings
from xml.etree import ElementTree

import pytest
from pydantic import ValidationError

from decodekit.constraints.grammar import Grammar, shipped
from decodekit.core.errors import InputError
from tests.llg.walks import accepts, byte_vocabulary, random_text

VOCABULARY = byte_vocabulary()


def parse_sql(text):
    try:
        sqlite3.connect(":memory:").execute(f"EXPLAIN {text}")
    except sqlite3.OperationalError as error:
        if "syntax error" in str(error) or "unrecognized token" in str(error):
            raise


def parse_python(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        ast.parse(text, mode="eval")


def parse_calls(text):
    for call in re.findall(r"(?s)<tool_call>(.*?)</tool_call>", text):
        assert json.loads(call).keys() == {"name", "arguments"}


PARSERS = {
    "json": json.loads,
    "csv": lambda text: list(csv.reader(io.StringIO(text, newline=""), strict=True)),
    "arithmetic": lambda text: ast.parse(text, mode="eval"),
    "sql_select": parse_sql,
    "python_expression": parse_python,
    "iso8601": datetime.datetime.fromisoformat,
    "email": lambda text: email.headerregistry.Address(addr_spec=text),
    "url": lambda text: urllib.parse.urlsplit(text).port,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "xml_fragment": ElementTree.fromstring,
    "tool_calls": parse_calls,
}
WRONG = {
    "json": ['{"a": }', "[1,]", "01", "'a'"],
    "csv": ['"a', 'a"b'],
    "arithmetic": ["1 +", "(1", "1 ** 2", "01"],
    "sql_select": ["SELECT FROM t", "SELECT * FROM t WHERE", "DELETE FROM t", "SELECT select FROM t"],
    "python_expression": ["x = 1", "f(", "lambda: ", "if", "1 +"],
    "iso8601": ["2023-02-29", "2024-13-01", "2024-01-01T25:00", "0000-01-01"],
    "email": ["a@b", "@example.org", "a b@example.org", "a..b@example.org"],
    "url": ["ftp://a.b", "http://", "https://a.b:65536/", "https://a b"],
    "ipv4": ["1.2.3", "1.2.3.256", "01.2.3.4"],
    "ipv6": ["1:2", "1::2::3", "12345::", ":::"],
    "uuid": ["123e4567", "123e4567-e89b-92d3-a456-42661417400", "g23e4567-e89b-42d3-a456-426614174000"],
    "xml_fragment": ["<p>", "<p></b>", "<p>&x;</p>", "text"],
    "tool_calls": ["<tool_call>", '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": "a"}</tool_call>'],
}


def test_every_grammar_is_tested() -> None:
    assert shipped().keys() == PARSERS.keys() == WRONG.keys()


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_grammar_has_a_header_and_an_example_that_it_accepts(name) -> None:
    text = Grammar(name=name).text()
    assert text.startswith("// ")
    example = re.search(r"(?m)^// Example: (.*)$", text)[1].replace("\\n", "\n")
    PARSERS[name](example)
    assert accepts(Grammar(name=name).compile(VOCABULARY), VOCABULARY, example)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_wrong_texts_are_rejected(name) -> None:
    compiled = Grammar(name=name).compile(VOCABULARY)
    assert [text for text in WRONG[name] if accepts(compiled, VOCABULARY, text)] == []


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_random_texts_are_read_by_an_independent_parser(name) -> None:
    compiled = Grammar(name=name).compile(VOCABULARY)
    for seed in range(8):
        rng = random.Random(seed)
        PARSERS[name](random_text(compiled, VOCABULARY, rng, rng.choice([0, 3, 8, 15])))


def test_sources() -> None:
    assert Grammar(lark='start: "a"').text() == 'start: "a"'
    assert accepts(Grammar(gbnf='root ::= "a"').compile(VOCABULARY), VOCABULARY, "a")
    with pytest.raises(ValidationError, match="one source"):
        Grammar()
    with pytest.raises(ValidationError, match="one source"):
        Grammar(name="json", lark="start: x")
    with pytest.raises(ValidationError, match="did you mean 'sql_select'"):
        Grammar(name="sql_selct")


def test_files(tmp_path) -> None:
    (tmp_path / "a.gbnf").write_text('root ::= "x"')
    (tmp_path / "a.txt").write_text("x")
    assert accepts(Grammar(file=tmp_path / "a.gbnf").compile(VOCABULARY), VOCABULARY, "x")
    with pytest.raises(InputError, match="neither"):
        Grammar(file=tmp_path / "a.txt").text()
    with pytest.raises(InputError, match="cannot be read"):
        Grammar(file=tmp_path / "none.lark").text()
