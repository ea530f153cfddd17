import json

import pytest

from decodekit.bench import load_suite, suites
from decodekit.bench import speculation as suite
from decodekit.testing import tiny_model

CATEGORIES = ("qa", "rag", "translation")


@pytest.fixture
def questions(tmp_path):
    """A file in the format of Spec-Bench, one category after the other."""
    path = tmp_path / "questions.jsonl"
    lines = [
        json.dumps({"question_id": number, "task": task, "turns": [f"{task} {number} abab abab", "and then?"]})
        for task in CATEGORIES
        for number in range(6)
    ]
    path.write_text("\n".join(lines))
    return path


def test_a_limit_takes_questions_of_every_category(questions) -> None:
    assert len(suite.reads(questions, None)) == 18
    prompts = suite.reads(questions, 6)
    assert [prompt.category for prompt in prompts] == [*CATEGORIES, *CATEGORIES]
    assert [prompt.text.split()[1] for prompt in prompts] == ["0"] * 3 + ["3"] * 3


def test_rows_hold_every_method_beside_plain_decoding(questions, tokenizer, monkeypatch) -> None:
    assert "speculation" in suites()
    monkeypatch.setattr(suite, "NEW_TOKENS", 6)
    monkeypatch.setattr(suite, "RESAMPLES", 100)
    monkeypatch.setattr(suite, "LOOKUPS", (3,))
    run, reads, _ = load_suite("speculation")
    rows = run(tiny_model("dense"), tokenizer, reads(questions, 9), lambda text: None)
    single = [row for row in rows if row["batch"] == 1]
    methods = {*suite.DRAFTERS, "lookup 3 (transformers)"}
    assert {(row["method"], row["category"]) for row in single} == {
        (method, group) for method in methods for group in ("all", *CATEGORIES)
    }
    assert {row["method"] for row in rows if row["batch"] == 8} == set(suite.DRAFTERS)
    for row in rows:
        assert row["identical"] == row["prompts"] / row["batch"]
        assert row["low"] <= row["speedup"] <= row["high"]
        assert row["tokens_a_pass"] >= 1


def test_the_interval_keeps_both_times_of_a_prompt_together() -> None:
    # Every prompt is twice as fast, whatever its length: nothing is uncertain.
    assert suite._interval([(2.0 * length, float(length)) for length in range(1, 20)]) == (2.0, 2.0)
    low, high = suite._interval([(1.0, 2.0), (2.0, 1.0)] * 10)
    assert low < 1 < high
