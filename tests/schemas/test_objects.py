"""Readers take the last of equal names, so no text may count on a member that comes again."""

import json
import random

import jsonschema
import pytest

from decodekit.core.errors import UnsupportedConstraint
from tests.constraints.test_json_schema import VOCABULARY, accepts, compiled
from tests.llg.walks import random_text

NAMES = {"properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"minProperties": 2}, "minProperties"),
        ({"minProperties": 2, "properties": {"a": {}}}, "minProperties"),
        ({"minProperties": 3, "required": ["a"]}, "minProperties"),
        ({"not": {"additionalProperties": {"type": "string"}}}, "not"),
        ({"not": {"patternProperties": {"^x": {"minimum": 3}}}}, "not"),
    ],
)
def test_what_names_that_come_again_could_meet_is_refused(schema, keyword) -> None:
    with pytest.raises(UnsupportedConstraint, match="come again") as refused:
        compiled({"type": "object", **schema})
    assert refused.value.keywords == (keyword,)


@pytest.mark.parametrize(
    "schema",
    [
        {"minProperties": 1},
        {"minProperties": 2, "required": ["a"]},
        {"minProperties": 2, "maxProperties": 2, **NAMES},
        {"minProperties": 3, "required": ["a"], **NAMES},
        {"minProperties": 1, "maxProperties": 3, "required": ["a"]},
        {"not": {"propertyNames": {"maxLength": 1}}},
        {"not": {"properties": {"a": {}}, "additionalProperties": False}},
        {"properties": {f"p{number}": {"type": "null"} for number in range(70)}, "additionalProperties": False},
        {"propertyNames": {"minLength": 0}, "required": ["a"]},
    ],
)
def test_texts_with_names_that_come_again_fit_as_they_are_read(schema) -> None:
    schema = {"type": "object", **schema}
    validator = jsonschema.Draft202012Validator(schema)
    constraint = compiled(schema, whitespace="compact")
    rng = random.Random(0)
    names = ["a", "a", "b", "c", "xy", "p1", "p69"]
    for _ in range(60):
        chosen = [rng.choice(names) for _ in range(rng.randrange(5))]
        text = "{" + ",".join(f'"{name}":null' for name in chosen) + "}"
        fits = validator.is_valid(json.loads(text))
        # A text with a name that comes again may be left out; one without may not.
        if len(set(chosen)) == len(chosen):
            assert accepts(constraint, VOCABULARY, text) == fits, text
        elif accepts(constraint, VOCABULARY, text):
            assert fits, text
    for seed in range(10):
        text = random_text(constraint, VOCABULARY, random.Random(seed), 30)
        assert validator.is_valid(json.loads(text)), text
