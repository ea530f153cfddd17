from decodekit.bench import load_suite, samples
from decodekit.testing import tiny_model


def test_a_shape_is_measured_beside_copies_of_the_prompt(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(samples, "SHAPE_SAMPLES", ((3, 20), (2, 30)))
    monkeypatch.setattr(samples, "SHAPE_NEW_TOKENS", 12)
    tiny_model("dense").config.save_pretrained(tmp_path)
    run, read, _ = load_suite("samples")
    rows = run(None, None, read(tmp_path / "config.json", None), lambda status: None)
    assert [(row["samples"], row["prompt_tokens"]) for row in rows] == [(3, 20), (2, 30)]
    assert all(row["times_faster"] == row["generate_s"] / row["decodekit_s"] > 0 for row in rows)
