from decodekit.bench import load_suite
from decodekit.testing import tiny_model


def test_both_ways_decode_the_same(tokenizer, monkeypatch) -> None:
    from decodekit.bench import engine

    monkeypatch.setattr(engine, "NEW_TOKENS", 6)
    suite, reader, _ = load_suite("engine")
    rows = suite(tiny_model("dense"), tokenizer, reader(None, 10), lambda status: None)
    padded, own = rows
    assert padded["requests"] == own["requests"] == own["same_outputs"] == 10
    assert own["tokens"] == padded["tokens"] > 10
    assert own["times_the_first"] == own["tokens_per_s"] / padded["tokens_per_s"]


def test_a_shape_is_measured_with_random_prompts_of_many_lengths(tokenizer, tmp_path, monkeypatch) -> None:
    from decodekit.bench import engine

    monkeypatch.setattr(engine, "NEW_TOKENS", 5)
    monkeypatch.setattr(engine, "SHAPE_REQUESTS", 6)
    monkeypatch.setattr(engine, "SHAPE_LENGTHS", (4, 20))
    tiny_model("dense").config.save_pretrained(tmp_path)
    suite, reader, _ = load_suite("engine")
    rows = suite(None, tokenizer, reader(tmp_path / "config.json", None), lambda status: None)
    assert rows[-1]["way"] == "engine, 6 slots"
    assert rows[-1]["requests"] == 6
    assert 0 < rows[-1]["tokens"] <= 30
