import math

from decodekit.recipe import Recipe, recipe_schema
from decodekit.scorers.python import Python
from decodekit.strategies.best_of_n import BestOfN
from tests.scorers.texts import scores


def test_calls_the_function_with_prompt_and_text() -> None:
    scorer = Python(function=lambda prompt, text: None if not text else len(prompt) - len(text))
    assert scores(scorer, "a", "abc", prompt="xy") == [1.0, -1.0]
    assert math.isnan(scores(scorer, "")[0])


def test_no_recipe_file_can_name_a_function_but_its_recipe_can_be_shown() -> None:
    schema, failures = recipe_schema()
    assert schema["$defs"]["Python"]["properties"]["function"]["not"] == {}
    assert not failures
    recipe = Recipe(strategy=BestOfN(n=1, scorer=Python(function=len)))
    assert recipe.to_dict()["strategy"]["scorer"] == {"kind": "python", "function": "<built-in function len>"}
