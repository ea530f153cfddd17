import json
import random

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from decodekit.constraints.json_schema import JsonSchema
from decodekit.core.errors import InputError, UnsupportedConstraint
from decodekit.schemas.grammar import MAX_CHARACTERS
from tests.llg.walks import accepts, byte_vocabulary, random_text

VOCABULARY = byte_vocabulary()
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Zé日][a-zé日]*$", "maxLength": 4},
        "age": {"type": "integer", "minimum": -5, "exclusiveMaximum": 120},
        "tags": {
            "type": "array",
            "items": {"enum": ["a", "b", 1, None]},
            "minItems": 1,
            "maxItems": 3,
            "uniqueItems": True,
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def compiled(schema, **options):
    return JsonSchema(schema=schema, **options).compile(VOCABULARY)


def judged(schema, *texts, **options):
    constraint = compiled(schema, **options)
    assert constraint.exact
    return [accepts(constraint, VOCABULARY, text) for text in texts]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            PERSON,
            ['{"age":1.0,"name":"Aé"}', '{"name": "\\u00e9", "age": -5, "tags":["b",1]}'],
            ['{"age":120,"name":"A"}'],
        ),
        (
            PERSON,
            ['{"tags":[null],"age":1e1,"name":"\\u65E5"}'],
            ['{"age":1}', '{"name":"A","age":1,"name":"B"}', "{}"],
        ),
        ({"type": "integer"}, ["1", "1.0", "-0", "1e2", "1.5e+16"], ["1.5", "01", "1e-2", "true"]),
        ({"type": "integer", "$schema": "http://json-schema.org/draft-04/schema#"}, ["1"], ["1.0"]),
        ({"minimum": 0.5, "exclusiveMaximum": 2}, ["0.5", "1.99", "5e-1", '"x"'], ["0.49", "2", "2.0", "2e0", "4e-1"]),
        ({"type": "number", "multipleOf": 0.01}, ["1.25", "3", "0.1000", "-7.5"], ["1.255", "0.001"]),
        ({"type": "integer", "multipleOf": 6}, ["12", "0", "-6.0", "114"], ["3", "4", "10"]),
        (
            {"type": "string", "maxLength": 2},
            ['"é日"', '"\\ud83d\\ude00a"', '"\\n\\""'],
            ['"abc"', '"\\ud83d\\ude00ab"'],
        ),
        ({"type": "string", "pattern": "b.$"}, ['"abc"', '"bb"'], ['"b"', '"ba\\n"']),
        ({"type": "string", "pattern": "^(?!admin)[a-z]+$"}, ['"user"'], ['"adminx"', '""']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"x"']),
        ({"format": "date"}, ['"x"'], []),
        (
            {"enum": [{"a": [1, "x"], "b": None}, "é"]},
            ['{"b":null,"a":[1.0,"x"]}', '"\\u00E9"'],
            ['{"a":[1,"x"]}', '"e"'],
        ),
        ({"not": {"enum": ["x", 1]}}, ['"y"', "2", "[]"], ['"x"', "1", "1.0"]),
        ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"}, ["2", "9"], ["6", "5"]),
        ({"type": "object", "required": ["a"]}, ['{"b":[{}],"a":1}'], ["{}", '{"b":1}']),
        (
            {"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
            ['{"x":null,"y":true}'],
            ['{"xy":true}'],
        ),
        (
            {"type": "object", "minProperties": 1, "maxProperties": 2},
            ['{"a":1}', '{"a":1,"b":2}'],
            ["{}", '{"a":1,"b":2,"c":3}'],
        ),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, ['{"a":1}', "{}"], ['{"ab":1}']),
        ({"dependentRequired": {"a": ["b"]}}, ['{"b":1}', '{"b":1,"a":2}', "1"], ['{"a":1}']),
        (
            {"if": {"properties": {"k": {"const": 1}}}, "then": {"required": ["v"]}, "type": "object"},
            ['{"k":1,"v":2}', '{"k":2}'],
            ['{"k":1}', "{}"],
        ),
        (
            {"prefixItems": [{"type": "null"}, {"type": "string"}], "items": False, "type": "array"},
            ["[]", '[null,"x"]'],
            ['["x"]', '[null,"x",1]'],
        ),
        ({"type": "array", "contains": {"const": 5}, "maxContains": 1}, ["[5]", "[1,5,2]"], ["[]", "[5,5]"]),
        (
            {
                "$defs": {"t": {"properties": {"c": {"items": {"$ref": "#/$defs/t"}}}, "type": "object"}},
                "$ref": "#/$defs/t",
            },
            ['{"c":[{"c":[]}]}'],
            ['{"c":[1]}'],
        ),
        ({"properties": {"a": False}}, ["{}", '{"b":1}'], ['{"a":1}']),
        (True, ["null", '{"a":[1,{"b":"c"}]}'], ["nul", '{"a"}']),
    ],
)
def test_texts_are_judged_as_the_schema_says(schema, good, bad) -> None:
    assert judged(schema, *good) == [True] * len(good)
    assert judged(schema, *bad) == [False] * len(bad)


def test_members_come_in_any_order() -> None:
    names = [f"p{number}" for number in range(30)]
    schema = {"properties": {name: {"type": "integer"} for name in names}, "required": names, "type": "object"}
    constraint = compiled({**schema, "additionalProperties": False})
    for seed in range(3):
        order = random.Random(seed).sample(names, 30)
        assert accepts(constraint, VOCABULARY, json.dumps(dict.fromkeys(order, 1)))
        assert not accepts(constraint, VOCABULARY, json.dumps(dict.fromkeys(order[1:], 1)))


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("", '{"a":0}'),
        ('{"x', '":"","a":0}'),
        ('{"x":[{"y', '":""}],"a":0}'),
        ('{"a":1,"x":"', '"}'),
        ('{"b":1,"', 'a":0}'),
    ],
)
def test_a_text_is_ended_by_what_is_open_and_required(text, end) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}
    state = compiled(schema, whitespace="compact").start()
    for token in VOCABULARY.encode(text):
        state.advance(token)
    assert state.shortest_end() == end.encode()


def test_whitespace_is_bounded() -> None:
    text = json.dumps({"a": [1, 2]}, indent=2)
    assert judged(True, '{"a":1}', '{"a": [1, 2]}', '{"a":  1}', text) == [True, True, False, False]
    assert judged(True, '{"a":1}', '{"a": 1}', whitespace="compact") == [True, False]
    assert judged(True, text, '{"a": 1}', "[" + " " * 65 + "]", whitespace="indented") == [True, True, False]


def test_what_cannot_be_enforced_is_refused_by_name_or_validated() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(
        UnsupportedConstraint, match=r"uniqueItems.*; unsupported: validate enforces the rest"
    ) as refused:
        compiled(schema)
    assert refused.value.keywords == ("uniqueItems",)
    relaxed = compiled(schema, unsupported="validate")
    assert (relaxed.exact, relaxed.unsupported) == (False, ("uniqueItems",))
    assert accepts(relaxed, VOCABULARY, "[1,1]")
    assert not accepts(relaxed, VOCABULARY, '["a"]')
    constraint = JsonSchema(schema=schema, unsupported="validate")
    assert constraint.violation("[1, 2]") is None
    assert "non-unique" in constraint.violation("[1, 1]")
    assert constraint.violation("[1").startswith("no JSON")
    assert constraint.violation("[" * 100_000).endswith("nested too deeply")


@pytest.mark.parametrize(
    ("schema", "error", "message"),
    [
        ({"$ref": "#"}, UnsupportedConstraint, "leads back to itself"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}}, UnsupportedConstraint, "itself"),
        ({"$ref": "#/$defs/none"}, UnsupportedConstraint, "leads nowhere"),
        ({"$schema": "http://example.org/mine"}, UnsupportedConstraint, "dialect"),
        ({"type": "strin"}, InputError, "no JSON Schema"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, InputError, "no value fits"),
        ({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}, InputError, "no value fits"),
    ],
)
def test_schemas_that_describe_nothing_are_refused(schema, error, message) -> None:
    with pytest.raises(error, match=message):
        compiled(schema)


def test_a_schema_beyond_the_limits_is_refused_before_it_is_compiled(tmp_path) -> None:
    with pytest.raises(ValidationError, match="more than"):
        JsonSchema(schema={"const": "x" * 50_000_000})
    with pytest.raises(ValidationError, match="more than"):
        JsonSchema(schema={"enum": list(range(300_000))})
    file = tmp_path / "large.json"
    file.write_bytes(b" " * (MAX_CHARACTERS + 1))
    with pytest.raises(InputError, match="at most"):
        JsonSchema(schema=file).compile(VOCABULARY)


def test_a_schema_may_be_a_file(tmp_path) -> None:
    file = tmp_path / "person.json"
    file.write_text(json.dumps(PERSON))
    assert accepts(JsonSchema(schema=file).compile(VOCABULARY), VOCABULARY, '{"age":1,"name":"A"}')
    file.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        JsonSchema(schema=file).compile(VOCABULARY)


SCALARS = (
    st.none() | st.booleans() | st.integers(-20, 20) | st.sampled_from([0.5, 1.0, -2.5]) | st.text('ab"é', max_size=3)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abx"), inner, max_size=3),
    max_leaves=6,
)


def keywords(inner):
    number = st.integers(-5, 10)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["integer", "number", "string", "object", "array", ["null", "string"], "boolean"]),
            "minimum": number,
            "exclusiveMaximum": number,
            "multipleOf": st.sampled_from([1, 2, 3, 0.5]),
            "minLength": st.integers(0, 2),
            "maxLength": st.integers(1, 3),
            "pattern": st.sampled_from(["a", "^b", "[^a]$", "^(a|é)*$"]),
            "enum": st.lists(SCALARS, min_size=1, max_size=3),
            "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            "required": st.lists(st.sampled_from("abx"), max_size=2, unique=True),
            "additionalProperties": inner,
            "maxProperties": st.integers(0, 2),
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 3),
            "contains": inner,
            "not": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
        },
    ).map(lambda schema: dict(list(schema.items())[:4]))


SCHEMAS = st.recursive(st.booleans() | keywords(st.just(True)), keywords, max_leaves=4)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=5), st.integers(0, 1000))
def test_random_schemas_judge_as_jsonschema_does(schema, values, seed) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    try:
        constraint = compiled(schema)
    except UnsupportedConstraint:
        return
    except InputError:  # no value fits
        assert not any(map(validator.is_valid, values))
        return
    for value in values:
        assert accepts(constraint, VOCABULARY, json.dumps(value)) == validator.is_valid(value)
    text = random_text(constraint, VOCABULARY, random.Random(seed), seed % 12)
    assert validator.is_valid(json.loads(text)), text
