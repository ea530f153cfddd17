import pytest

from decodekit.bench import load_suite, overhead, suites
from decodekit.bench.prompts import DEFAULT, read_prompts
from decodekit.bench.timing import paired
from decodekit.core.errors import InputError


def test_overhead_compares_the_same_tokens(dense, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(overhead, "NEW_TOKENS", 6)
    monkeypatch.setattr(overhead, "ROUNDS", 2)
    pairs = []
    monkeypatch.setattr(
        overhead, "paired", lambda *ways, **options: pairs.append(paired(*ways, **options)) or pairs[-1]
    )
    rows = load_suite("overhead").run(dense, tokenizer, list(DEFAULT), lambda status: None)
    assert [(row["batch"], row["cache"]) for row in rows] == [
        (1, "dynamic"),
        (1, "paged"),
        (8, "dynamic"),
        (8, "paged"),
    ]
    for row, pair in zip(rows, pairs, strict=True):
        assert row["identical_tokens"]
        assert row["ratio_q1"] <= row["ratio"] <= row["ratio_q3"]
        assert row["generate_ms_a_step"] == pytest.approx(1000 * pair.peer / 6)
        assert row["decodekit_ms_a_step"] == pytest.approx(1000 * pair.ours / 6)


def test_suites_are_found_with_what_they_measure() -> None:
    assert suites()["overhead"].startswith("What a token costs")
    assert not {"prompts", "timing", "cases", "states"} & suites().keys()
    assert all(callable(load_suite(name).run) for name in suites())


def test_paired_calls_both_in_turn() -> None:
    calls = []
    paired(lambda: calls.append("peer"), lambda: calls.append("ours"), rounds=4)
    assert calls == ["peer", "ours"] + ["peer", "ours", "ours", "peer"] * 2


def test_prompts_come_from_a_file(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert read_prompts(path, None) == ["a", "b"]
    assert read_prompts(path, 1) == ["a"]
    assert read_prompts(None, 3) == list(DEFAULT[:3])
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(InputError, match=r"data\.jsonl:2: expected a JSON object with the key 'prompt'"):
        read_prompts(path, None)
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl", None)
