from decodekit.bench import load_suite, quantized


def test_quantized_compares_every_kind_with_full_precision(dense, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(quantized, "NEW_TOKENS", 12)
    monkeypatch.setattr(quantized, "FILLER_TOKENS", (40, 60))
    rows = load_suite("quantized").run(dense, tokenizer, ["a b", "one two three"], lambda status: None)
    assert [row["quantization"] for row in rows] == ["none", "int8", "fp8", "int4", "int2"]
    assert [rows[0][key] for key in ("kv_share", "same_token", "same_prefix", "logit_error")] == [1, 1, 1, 0]
    shares = [row["kv_share"] for row in rows]
    assert shares == sorted(shares, reverse=True)
    int8, int2 = rows[1], rows[-1]
    assert 0 < int8["logit_error"] < int2["logit_error"]
    assert int8["same_token"] >= int2["same_token"]
