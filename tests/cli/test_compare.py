import json

GREEDY = "generation: {max_new_tokens: 6, eos_token_id: 96}\n"
SAMPLED = """
strategy: {kind: best_of_n, n: 3, scorer: logprob}
generation: {max_new_tokens: 6, eos_token_id: 96, do_sample: true, seed: 0}
"""


def test_recipes_are_compared_and_the_comparison_goes_on(cli, recipe, tiny_folder, tmp_path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "Who won?", "answer": "1"}\n{"prompt": "a", "answer": "2"}\n')
    arguments = ("compare", recipe(GREEDY, "one.yaml"), recipe(SAMPLED, "two.yaml"), "--data", "data.jsonl")
    options = ("-m", tiny_folder, "--metric", "chrf", "-o", "out")
    result = cli(*arguments, *options, "--json")
    assert result.code == 0, result.err
    assert result.err.splitlines()[:3] == [
        "plain: rows 1 to 2 of 2 (0 % done)",
        "one: rows 1 to 2 of 2 (16 % done)",
        "two: rows 1 to 2 of 2 (33 % done)",
    ]
    assert [own["recipe"] for own in result.json["recipes"]] == ["plain", "one", "two"]
    assert result.json["rows"] == 2
    assert result.json == json.loads((tmp_path / "out/report.json").read_text())
    assert result.json["recipes"][2]["samples"] >= 1
    assert result.json["recipes"][2]["kv_bytes"] > 0
    assert "<svg" in (tmp_path / "out/plot.svg").read_text()
    before = (tmp_path / "out/rows.jsonl").read_text()
    shown = cli(*arguments, *options, "--resume")
    assert (tmp_path / "out/rows.jsonl").read_text() == before
    assert "chrf over 2 rows" in shown.out
    for word in ("one", "two", "quality", "verdict"):
        assert word in shown.out


def test_what_cannot_be_compared_says_why(cli, recipe, tiny_folder, tmp_path) -> None:
    (tmp_path / "data.jsonl").write_text('{"x": "Who won?"}\n')
    result = cli("compare", recipe(GREEDY), "--data", "data.jsonl", "-m", tiny_folder)
    assert result.code == 2
    assert "data.jsonl:1: none of the fields prompt, question" in result.err
    assert not (tmp_path / "compare").exists()
    assert cli("compare", recipe(GREEDY), "--data", "none.jsonl").code == 2
