import json

RECIPE = """
rules: [{kind: temperature, t: 0.7}]
generation: {max_new_tokens: 12, do_sample: true, seed: 5, suppress_tokens: [1]}
"""


def ids(path):
    records = map(json.loads, path.read_text().splitlines()[1:])
    return [record["id"] for record in records if record["type"] == "token" and record["row"] == 0]


def test_a_replay_keeps_what_came_before_and_changes_what_follows(cli, recipe, tiny_folder, tmp_path) -> None:
    options = ("-m", tiny_folder)
    cli("run", recipe(RECIPE), "Who won?", "a", *options, "--trace", "t.jsonl")
    before = ids(tmp_path / "t.jsonl")
    result = cli("replay", "t.jsonl", "--at", 5, "--set", "rules.0.t=9.0", *options, "--json", "--view", "both.html")
    assert result.code == 0, result.err
    after = ids(tmp_path / "t.at5.jsonl")
    assert after[:5] == before[:5]
    assert after != before
    assert len(after) == 12
    assert result.json["output"]["token_ids"] == after
    assert [result.json[name] for name in ("row", "at", "set")] == [0, 5, ["rules.0.t=9.0"]]
    assert (tmp_path / "both.html").read_text().count("<script") == 2
    shown = cli("replay", "t.jsonl", "--at", 5, "--set", "rules.0.t=9.0", *options)
    assert "as traced" in shown.out
    assert "rules.0.t=9.0" in shown.out


def test_a_replay_without_a_change_is_what_was(cli, recipe, tiny_folder, tmp_path) -> None:
    drafting = RECIPE + "drafter: {kind: ngram, schedule: constant}\n"
    cli("run", recipe(drafting), "Who won?", "-m", tiny_folder, "--trace", "t.jsonl")
    for at in (0, 3, 12):
        cli("replay", "t.jsonl", "--at", at, "-m", tiny_folder, "-o", "new.jsonl")
        assert ids(tmp_path / "new.jsonl") == ids(tmp_path / "t.jsonl")


def test_a_token_that_the_new_settings_would_ban_is_kept(cli, recipe, tiny_folder, tmp_path) -> None:
    cli("run", recipe(RECIPE), "Who won?", "-m", tiny_folder, "--trace", "t.jsonl")
    before = ids(tmp_path / "t.jsonl")
    ban = f"generation.suppress_tokens=[1, {before[0]}]"
    cli("replay", "t.jsonl", "--at", 1, "--set", ban, "-m", tiny_folder, "-o", "new.jsonl")
    after = ids(tmp_path / "new.jsonl")
    assert after[0] == before[0]
    assert before[0] not in after[1:]


def test_what_cannot_be_replayed_says_why(cli, recipe, tiny_folder) -> None:
    cli("run", recipe(RECIPE), "Who won?", "-m", tiny_folder, "--trace", "t.jsonl")
    cases = [
        (("--at", 99), "row 0 of t.jsonl has 12 tokens"),
        (("--at", 1, "--row", 3), "no tokens of row 3"),
        (("--at", 1, "--set", "strategy={kind: mbr, n: 2, utility: exact}"), "chooses between several"),
    ]
    for options, message in cases:
        result = cli("replay", "t.jsonl", *options, "-m", tiny_folder)
        assert result.code == 2
        assert message in result.err
