import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import decodekit
from decodekit.integrations.models import load_model

PLAIN = "generation: {max_new_tokens: 6, suppress_tokens: [1]}\n"


def test_json_is_one_object_a_prompt(cli, recipe, tiny_folder) -> None:
    result = cli("run", recipe(PLAIN), "Who won?", "a", "-m", tiny_folder, "--json")
    assert result.code == 0, result.err
    first, second = result.json
    assert first["prompt"] == "Who won?"
    assert second["prompt"] == "a"
    assert len(first["token_ids"]) == len(first["logprobs"]) == 6
    assert first["finish_reason"] == "length"
    assert first["stats"]["target_forwards"] == 6
    assert set(first) == {
        "prompt", "text", "token_ids", "finish_reason", "logprobs", "candidates", "stats", "error"
    }  # fmt: skip


def test_text_goes_to_stdout_and_notes_to_stderr(cli, recipe, tiny_folder) -> None:
    result = cli("run", recipe(PLAIN), "Who [won]?", "-m", tiny_folder)
    [output] = cli("run", recipe(PLAIN), "Who [won]?", "-m", tiny_folder, "--json").json
    assert result.out == f"> Who [won]?\n{output['text']}\n\n"
    assert "6 tokens, length" in result.err


def test_a_text_that_breaks_what_was_not_enforced_is_said_to(capsys) -> None:
    from decodekit.cli import run
    from decodekit.core.types import Output

    held = {"kind": "json_schema", "unsupported": ["uniqueItems"], "valid": False, "violation": "1 comes twice"}
    run._print_stats(Output("[1,1]", [1], "eos", stats={"constraint": held}), prompt=None)
    assert "the text is not valid: 1 comes twice; not enforced: uniqueItems" in " ".join(
        capsys.readouterr().err.split()
    )


def test_texts_are_printed_to_the_letter(cli, recipe, tiny_folder, monkeypatch) -> None:
    from decodekit.cli import run
    from decodekit.core.types import Output

    text = "if x:\n\treturn 1\a :smile: [bold]x"
    monkeypatch.setattr(run, "decode", lambda *_: ([(0, Output(text, [1], "eos"))], False))
    assert cli("run", recipe(PLAIN), ":heart: [red]").out == f"> :heart: [red]\n{text}\n\n"


def test_the_prompt_can_come_from_standard_input(cli, recipe, tiny_folder) -> None:
    result = cli("run", recipe(PLAIN), "-m", tiny_folder, "--json", stdin="Who won?\n")
    assert [output["prompt"] for output in result.json] == ["Who won?"]


def test_an_empty_prompt_is_refused_before_a_model_is_loaded(cli, recipe) -> None:
    result = cli("run", recipe(PLAIN), " ", "-m", "no/such/model")
    assert (result.code, result.err) == (2, "error: the prompt is empty; give at least one word\n")


def test_a_row_that_fails_leaves_the_others_and_exits_1(cli, recipe, tiny_folder) -> None:
    result = cli("run", recipe(PLAIN), "Who won?", "", "x" * 3000, "-m", tiny_folder, "--json")
    assert result.code == 1
    good, empty, long = result.json
    assert good["finish_reason"] == "length"
    assert empty["error"] == "prompt 1: the prompt is empty; give at least one word"
    assert "model's context holds 2048" in long["error"]
    shown = cli("run", recipe(PLAIN), "Who won?", "", "-m", tiny_folder)
    assert "error: prompt 1: the prompt is empty" in shown.err
    assert shown.code == 1


def test_several_sequences_of_several_prompts(cli, recipe, tiny_folder) -> None:
    text = "rules: []\ngeneration: {max_new_tokens: 3, do_sample: true, num_return_sequences: 2, seed: 1}\n"
    result = cli("run", recipe(text), "Who won?", "", "a", "-m", tiny_folder, "--json")
    assert [output["prompt"] for output in result.json] == ["Who won?", "Who won?", "", "a", "a"]
    assert result.json[2]["finish_reason"] == "error"


def test_set_beats_the_recipe(cli, recipe, tiny_folder) -> None:
    result = cli("run", recipe(PLAIN), "a", "-m", tiny_folder, "--json", "--set", "generation.max_new_tokens=2")
    assert len(result.json[0]["token_ids"]) == 2


def test_bad_input_is_one_clear_line_and_exit_2(cli, recipe, tiny_folder, tmp_path) -> None:
    cases = [
        (("run", "nowhere.yaml", "a"), "nowhere.yaml"),
        (("run", recipe("strategy: {kind: dolla}\n", "a.yaml"), "a"), "unknown strategy 'dolla': did you mean 'dola'"),
        (("run", recipe("rules: [{kind: temperature, t: 0}]\n", "b.yaml"), "a"), "b.yaml:1:"),
        (("run", recipe(PLAIN), "a", "-m", tmp_path / "no-model"), "no-model"),
        (
            ("run", recipe(PLAIN), "a", "-m", tiny_folder, "--trace", "no/such/folder.jsonl"),
            "the trace cannot be written",
        ),
        (("run", recipe(PLAIN), "a", "-m", tiny_folder, "--set", "generation.num_beams=3"), "num_beams"),
        (("run",), "Missing argument"),
        (("bench", "nope"), "unknown suite 'nope'"),
    ]
    for arguments, message in cases:
        result = cli(*arguments)
        assert result.code == 2, (arguments, result.err)
        assert message in result.err, (message, result.err)
        assert "Traceback" not in result.err
        assert result.out == ""
        if message != "Missing argument":
            assert result.err.strip().count("\n") == 0, result.err


def test_a_trace_is_written(cli, recipe, tiny_folder, tmp_path) -> None:
    cli("run", recipe(PLAIN), "a", "-m", tiny_folder, "--trace", "t.jsonl", "--set", "strategy=dola")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert lines[0]["decodekit"] == decodekit.__version__
    assert [line["position"] for line in lines[1:7]] == list(range(6))
    assert all("premature_layer" in line for line in lines[1:7])


def test_a_terminal_sees_tokens_as_they_come_in_colours(recipe, tiny_folder, tmp_path) -> None:
    path = recipe("generation: {max_new_tokens: 40, do_sample: true, seed: 1, suppress_tokens: [1]}\n")
    arguments = ["run", path, "Who [won]?", "a", "-m", tiny_folder]
    outer, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "decodekit", *map(str, arguments)], stdout=inner, stderr=subprocess.PIPE, env=environment
    )
    os.close(inner)
    screen = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while data := os.read(outer, 65536):
            screen += data
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode())
    [first, second] = decodekit.load(path).run(*load_model(str(tiny_folder)), ["Who [won]?", "a"])
    squeezed = "".join(plain.split())
    for prompt, output in (("Who [won]?", first), ("a", second)):
        assert f"> {prompt}" in plain
        assert all("".join(line.split()) in squeezed for line in output.text.split("\n"))
    assert "rows left" in plain
    assert len(set(re.findall(rb"\x1b\[38;2;[0-9;]*m", screen))) >= 2
    assert b"40 tokens, length" in err


# Whoever runs the tests may ignore the signal, which a child inherits.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("decodekit", run_name="__main__", alter_sys=True)
"""


def test_an_interrupt_keeps_what_was_finished_and_exits_130(recipe, tiny_folder, tmp_path) -> None:
    endless = recipe("generation: {max_new_tokens: 2000, suppress_tokens: [1]}\n")
    trace = tmp_path / "t.jsonl"
    arguments = ["run", endless, "a", "-m", tiny_folder, "--json", "--trace", trace]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not (trace.exists() and trace.read_text().count("\n") > 5) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    [output] = json.loads(out)
    assert process.returncode == 130, err
    assert output["finish_reason"] == "cancelled"
    assert 5 <= len(output["token_ids"]) < 2000
    assert "Traceback" not in err


def test_version_and_help() -> None:
    run = [sys.executable, "-m", "decodekit"]
    assert subprocess.run([*run, "--version"], capture_output=True, text=True, check=True).stdout.split() == [
        "decodekit",
        decodekit.__version__,
    ]
    text = subprocess.run([*run, "--help"], capture_output=True, text=True, check=True).stdout
    for command in ("run", "plugins", "check", "schema", "export", "new", "bench"):
        assert command in text


def test_an_amateur_that_a_recipe_names_is_loaded_once(cli, recipe, tiny_folder, tmp_path, monkeypatch) -> None:
    from decodekit.integrations import models
    from decodekit.testing import tiny_model, tiny_tokenizer

    amateur, other = tmp_path / "amateur", tmp_path / "other"
    tiny_model("dense", layers=2, seed=5).save_pretrained(amateur)
    tiny_tokenizer().save_pretrained(amateur)
    tiny_model("dense", layers=2, seed=5).save_pretrained(other)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    loaded = []
    load_model = models.load_model
    monkeypatch.setattr(
        models, "load_model", lambda name, **options: loaded.append(name) or load_model(name, **options)
    )
    text = f"strategy: {{kind: contrastive_decoding, amateur: ./amateur}}\n{PLAIN}"  # beside its file
    result = cli("run", recipe(text), "Who won?", "a", "-m", tiny_folder, "--json")
    assert result.code == 0, result.err
    assert loaded == [str(tiny_folder), str(amateur)]
    plain = cli("run", recipe(PLAIN), "Who won?", "a", "-m", tiny_folder, "--json").json
    prompts = [output["stats"]["forwarded_tokens"] for output in plain]
    assert [output["stats"]["forwarded_tokens"] for output in result.json] == [2 * count for count in prompts]
    assert [output["token_ids"] for output in result.json] != [output["token_ids"] for output in plain]

    refused = cli("run", recipe(text), "a", "-m", tiny_folder, "--set", f"strategy.amateur={other}")
    assert refused.code == 2
    assert "(98 tokens) differs from the main model's (97) in 1 entries" in refused.err
    assert "Traceback" not in refused.err
    missing = cli("run", recipe(text), "a", "-m", tiny_folder, "--set", "strategy.amateur=./nowhere")
    assert missing.code == 2
    assert f"model folder '{tmp_path / 'nowhere'}' does not exist" in missing.err


def test_standard_input_has_a_limit(cli, recipe, monkeypatch) -> None:
    monkeypatch.setattr("decodekit.cli.run._MAX_PROMPT", 10)
    result = cli("run", recipe("{}"), stdin="twelve chars")
    assert result.code == 2
    assert "standard input holds more than 10 characters" in result.err
