from decodekit.bench import load_suite, needle
from decodekit.bench.prompts import DEFAULT


def test_every_cache_is_asked_at_every_place_and_length(dense, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(needle, "LENGTHS", (200, 300))
    monkeypatch.setattr(needle, "CASES", 1)
    monkeypatch.setattr(needle, "DEPTHS", (0.0, 1.0))
    rows = load_suite("needle").run(dense, tokenizer, list(DEFAULT), lambda status: None)
    assert [row["cache"] for row in rows] == ["full", "full", "int8", "int8", "int4", "int4", "window", "window"]
    assert all(row["found"] == row["depth 0"] + row["depth 1"] <= row["cases"] == 2 for row in rows)
    assert rows[0]["prompt_tokens"] < 300 <= rows[1]["prompt_tokens"]


def test_the_needle_stands_where_it_should(tokenizer) -> None:
    for depth in (0.0, 0.5, 1.0):
        key, text = needle._prompt(tokenizer, DEFAULT, 600, depth, 3)
        place = text.index(f"The pass key is {key}.") / (len(text) - len(needle.QUESTION))
        assert abs(place - depth) < 0.25
        assert text.endswith(needle.QUESTION)


def test_a_model_that_repeats_the_key_finds_it(tokenizer, monkeypatch) -> None:
    from types import SimpleNamespace

    class Echo:
        def run(self, model, tokenizer, texts, raw):
            keys = [text.split("The pass key is ")[1][:5] for text in texts]
            return [SimpleNamespace(text=f" {key}.", stats={"prompt_tokens": 7}) for key in keys]

    monkeypatch.setattr(needle, "load", lambda recipe: Echo())
    rows = needle.run(None, tokenizer, DEFAULT, lambda status: None)
    assert all(row["found"] == row["cases"] == 20 and row["depth 0.5"] == 4 for row in rows)
