import json

import pytest

from decodekit.core.errors import RecipeError
from decodekit.core.registry import create
from tests.scorers.texts import scores

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


def test_json_or_not() -> None:
    texts = ['{"a": 1}', " [1, 2]\n", '{"a": 1} so', "", "nan", "[" * 100_000]
    assert scores(create("scorers", "json"), *texts) == [1, 1, 0, 0, 0, 0]


def test_valid_under_a_schema_given_or_in_a_file(tmp_path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    for schema in (SCHEMA, str(file)):
        scorer = create("scorers", {"kind": "json", "schema": schema})
        assert scores(scorer, '{"a": 1}', '{"a": "1"}', "{}", "a") == [1, 0, 0, 0]


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"json\.schema: is no JSON Schema: 'objct' is not valid"):
        create("scorers", {"kind": "json", "schema": {"type": "objct"}})
    with pytest.raises(RecipeError, match=r"the schema file '/nowhere.json' cannot be read"):
        create("scorers", {"kind": "json", "schema": "/nowhere.json"})
