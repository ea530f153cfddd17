from decodekit.recipe import load_recipe
from decodekit.runtime.engine import Engine
from decodekit.runtime.jsonl import Line
from decodekit.runtime.mapping import Mapper
from decodekit.testing import tiny_model, tiny_tokenizer


def test_lines_that_an_engine_is_given_again_have_the_same_results() -> None:
    recipe = load_recipe({"generation": {"max_new_tokens": 3}})
    mapper = Mapper(Engine(tiny_model("dense"), tiny_tokenizer(), recipe, slots=2), recipe)
    lines = [Line(number, {"id": f"r{number}", "prompt": "ab" * number}) for number in range(1, 5)]
    first = list(mapper.run(lines))
    assert [row["output_tokens"] for row in first] == [3] * 4

    def told(rows):
        return [(row["id"], row["text"], row.get("error")) for row in rows]

    assert told(mapper.run(lines)) == told(first)
