"""Uniform walks over legal tokens, brought to their end the shortest way: what comes out is what others accept."""

import json
import random
import re

import jsonschema
import pytest

from decodekit.constraints.grammar import Grammar
from decodekit.constraints.json_schema import JsonSchema
from decodekit.constraints.regex import Regex
from tests.constraints.test_grammar import PARSERS
from tests.constraints.test_json_schema import PERSON
from tests.llg.walks import byte_vocabulary, random_text

VOCABULARY = byte_vocabulary()
WALKS = 2_000
REGEXES = [
    r"1(\.5)?",
    r"(a|日本)+[^a]?",
    r"(?!.*aa)[ab]{3,8}",
    r"\d{4}-\d\d-\d\d",
    "[😀-😎]{1,3}|é",
    r"(?:yes|no|may(?:be)?)(?: *, *(?:yes|no))*",
    r"[^\W\d_]{2,12}\.[a-z]{2,3}",
    r"(?=.*\d)(?=.*[A-Z])[A-Za-z\d]{6,10}",
    r"[+-]?(?:0|[1-9]\d*)(?:\.\d+)?(?:e[+-]?\d+)?",
    r"(?:\([^()\n]{0,4}\)|\[[^\]\n]{0,4}\])+",
]
TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#"}}}}
SCHEMAS = [
    PERSON,
    {**TREE, "required": ["v"]},
    {
        "type": "object",
        "properties": {"b": {"const": 1}, "a": {"type": "boolean"}},
        "required": ["b"],
        "minProperties": 2,
    },
    {"oneOf": [{"type": "string", "minLength": 2}, {"type": "integer", "minimum": 3}, {"type": "null"}]},
    {"type": "array", "contains": {"const": "x"}, "items": {"type": ["string", "null"]}, "maxItems": 4},
    {"type": "integer", "minimum": -20, "exclusiveMaximum": 1000, "multipleOf": 5},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "number"}], "items": False, "minItems": 1},
    {"type": "object", "patternProperties": {"^x_": {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "dependentRequired": {"a": ["b"]}},
    {"anyOf": [{"type": "string", "pattern": "^[a-z]+-[0-9]$"}, {"enum": [None, "x", {"y": [1]}]}]},
]
GRAMMARS = [
    "arithmetic",
    "csv",
    "email",
    "ipv4",
    "ipv6",
    "iso8601",
    "json",
    "python_expression",
    "sql_select",
    "xml_fragment",
]


def walked(constraint):
    compiled, rng = constraint.compile(VOCABULARY), random.Random(0)
    return (random_text(compiled, VOCABULARY, rng, rng.choice([0, 2, 5, 10, 20])) for _ in range(WALKS))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", REGEXES)
def test_walks_of_a_regex_match_it(pattern) -> None:
    for text in walked(Regex(pattern=pattern)):
        assert re.fullmatch(pattern, text), text


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_walks_of_a_schema_are_valid(schema) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    for text in walked(JsonSchema(schema=schema)):
        assert validator.is_valid(json.loads(text)), text


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAMMARS)
def test_walks_of_a_grammar_are_read_by_another_parser(name) -> None:
    for text in walked(Grammar(name=name)):
        PARSERS[name](text)
