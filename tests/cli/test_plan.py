import dataclasses
import json

import pytest

import decodekit

CONFIG = {"model_type": "qwen3_5_text", "num_hidden_layers": 24, "hidden_size": 1024, "linear_num_value_heads": 16}


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "num_key_value_heads": 2}))
    return file


def test_json_is_what_python_gives(cli, config):
    result = cli("plan", "--config", config, "--context", 1200, "--batch", 3, "--budget", "1GiB", "--json")
    assert result.code == 0
    expected = decodekit.ledger(config, 1200, 3, budget="1GiB")
    assert result.json == json.loads(json.dumps(dataclasses.asdict(expected)))
    assert result.json["kv_bytes_per_token"] == 12 << 10


def test_options_reach_the_ledger(cli, config):
    result = cli(
        "plan", "--config", config, "--context", 33, "--batch", 1, "--dtype", "fp8", "--block-size", 32, "--json"
    )
    assert result.json["kv_bytes_per_token"] == 6 << 10
    assert result.json["block_waste_bytes"] == 31 * (6 << 10)


def test_a_person_reads_sizes_and_advice(cli, config):
    result = cli("plan", "--config", config, "--context", 32768, "--batch", 8, "--budget", "2GiB")
    assert result.code == 0
    for text in (
        "qwen3_5_text: 8 rows of 32768 tokens, bfloat16, blocks of 16",
        "18 linear_attention",
        "864 KiB",
        "2048 blocks a row",
        "from 536 tokens on",
        "2 GiB hold 5 rows of 32768 tokens, or 8 of 20224 tokens",
        "does not fit: rows of any length",
        "recommended: int8 takes 0.59 of paged",
    ):
        assert text in result.out


def test_a_budget_that_holds_nothing_says_what_would(cli, config):
    result = cli("plan", "--config", config, "--context", 100, "--batch", 1, "--budget", "1KiB")
    assert "1 KiB hold none of the caches below: the smallest, " in result.out
    assert "give a larger --budget, or a smaller --context or --batch" in " ".join(result.out.split())
    assert "0 rows" not in result.out


def test_what_is_missing_or_wrong_is_explained(cli):
    missing = cli("plan", "--budget", "1KiB")
    assert missing.code == 2
    assert missing.err.splitlines()[-1] == "--context N: tokens of a row, prompt and output"
    assert "RECIPE: a recipe file (YAML or JSON)" in cli("check").err


def test_a_model_folder_needs_no_weights(cli, config):
    assert cli("plan", "-m", config.parent, "--context", 10, "--batch", 1, "--json").json["batch"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "got neither"),
        (("-m", "x", "--config", "y"), "got both"),
        (("--config", "missing.json"), "config 'missing.json' cannot be read (No such file or directory)"),
        (("-m", "not a model"), "cannot read the config of model 'not a model'"),
        (("--config", "config.json", "--budget", "lots"), "size 'lots' is not a number of bytes"),
    ],
)
def test_bad_input_is_one_line(cli, config, arguments, message):
    result = cli("plan", *arguments, "--context", 10, "--batch", 1)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_workload_is_replayed(cli, tiny_folder, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(json.dumps({"prompt_tokens": 20 + n, "output_tokens": 5 + n * 7 % 19}) + "\n" for n in range(20))
    )
    asked = ("plan", "-m", tiny_folder, "--context", 64, "--batch", 4, "--workload", trace)
    document = cli(*asked, "--budget", "1MiB", "--json").json
    assert [way["way"].split(",")[0] for way in document["ways"]] == ["static batches", "continuous", "continuous"]
    assert document["ways"][1]["steps"] < document["ways"][0]["steps"]
    assert document["floor"]
    assert document["split"]["kv_blocks"] > 0
    assert "a floor" in cli(*asked).out
    short = cli(*asked, "--budget", "1KiB")
    assert short.code == 2
    assert "the longest request of the workload has" in short.err
