import pytest

from decodekit.bench import load_suite, strategies
from decodekit.bench.prompts import DEFAULT
from decodekit.bench.strategies import Timing


def test_a_row_compares_a_strategy_with_plain_decoding(dense, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(strategies, "PROMPT_TOKENS", (16, 40))
    given = []

    def time(decoder, model, tokenizer, prompt, **options) -> Timing:
        given.append(prompt)
        return Timing(0.010, 0.4) if decoder.recipe.strategy.kind == "sample" else Timing(0.012, 0.6)

    monkeypatch.setattr(strategies, "_time", time)
    rows = load_suite("strategies").run(dense, tokenizer, list(DEFAULT), lambda status: None)
    assert [(row["strategy"], row["prompt_tokens"]) for row in rows] == [
        (name, length) for name in strategies.STRATEGIES for length in (16, 40)
    ]
    assert all(len(prompt["prompt"]) > len(prompt["context"]) for prompt in given)
    assert all(prompt["prompt"].startswith(prompt["context"]) for prompt in given)
    for row in rows:
        assert row["plain_ms_a_token"] == pytest.approx(10)
        assert row["ms_a_token"] == pytest.approx(12)
        assert row["ratio"] == pytest.approx(1.2)
        assert row["whole_ratio"] == pytest.approx(1.5)


def test_timings_are_those_of_the_call(dense, tokenizer) -> None:
    options = {"max_new_tokens": 4, "min_new_tokens": 4}
    timing = strategies._time(strategies.load({}), dense, tokenizer, {"prompt": "Who won?"}, **options)
    assert 0 < 3 * timing.step < 10 * timing.whole


def test_a_shape_is_measured_with_rules_and_constraints(dense, tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(strategies, "SHAPE_PROMPT_TOKENS", 16)
    monkeypatch.setattr(strategies, "SHAPE_NEW_TOKENS", 12)
    dense.config.save_pretrained(tmp_path)
    run, read, _ = load_suite("strategies")
    rows = run(None, tokenizer, read(tmp_path / "config.json", None), lambda status: None)
    assert [row["strategy"] for row in rows] == ["dola", "cad", "rules", "json_schema"]
    assert all(0.05 < row["ratio"] < 20 for row in rows)
