from decodekit.bench import load_suite
from decodekit.testing import tiny_model


def test_both_ways_decode_the_same(tokenizer, monkeypatch) -> None:
    from decodekit.bench import engine

    monkeypatch.setattr(engine, "NEW_TOKENS", 6)
    suite, reader = load_suite("engine")
    rows = suite(tiny_model("dense"), tokenizer, reader(None, 10), lambda status: None)
    padded, own = rows
    assert padded["requests"] == own["requests"] == own["same_outputs"] == 10
    assert own["tokens"] == padded["tokens"] > 10
    assert own["times_the_first"] == own["tokens_per_s"] / padded["tokens_per_s"]
