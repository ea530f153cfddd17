import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from decodekit.cli import main, shards
from decodekit.cli.map import Input, Options, map_rows
from decodekit.core.errors import InputError, Refused
from decodekit.integrations import cluster

PLAIN = "generation: {max_new_tokens: 5, suppress_tokens: [1]}\n"


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_come_out_in_order_with_what_they_cost(cli, recipe, tiny_folder, tmp_path) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": f"r{n}", "prompt": "a" * (n + 1)} for n in range(6)])
    result = cli("map", recipe(PLAIN), source, "out.jsonl", "-m", tiny_folder, "--json", "--slots", 3)
    assert result.code == 0, result.err
    rows = read(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == [f"r{n}" for n in range(6)]
    alone = cli("run", recipe(PLAIN), "aaa", "-m", tiny_folder, "--json").json
    assert rows[2]["text"] == alone[0]["text"]
    assert rows[2]["output_tokens"] == 5
    assert result.json["rows"] == 6
    assert result.json["output_tokens"] == 30
    assert result.json["forwarded_tokens"] == sum(row["forwarded_tokens"] for row in rows)


def test_templates_fields_and_options_of_a_row(cli, recipe, tiny_folder, tmp_path) -> None:
    rows = [
        {"id": 1, "question": "who", "answer": "no input of a recipe"},
        {"id": 2, "question": "who", "generation": {"max_new_tokens": 2}},
        {"id": 3, "question": "who", "recipe": {"rules": [{"kind": "bad_words", "words": ["q"]}]}, "seed": 4},
        {"id": 4},
        {"id": 5, "question": "who", "generation": {"max_tokens": 2}},
    ]
    source = write(tmp_path / "in.jsonl", rows)
    result = cli("map", recipe(PLAIN), source, "out.jsonl", "-m", tiny_folder, "--template", "Q: {question}?")
    assert result.code == 1
    first, short, _, missing, wrong = read(tmp_path / "out.jsonl")
    [alone] = cli("run", recipe(PLAIN), "Q: who?", "-m", tiny_folder, "--json").json
    assert first["text"] == alone["text"]
    assert short["output_tokens"] == 2
    assert "needs 'question', which the row does not have" in missing["error"]
    assert "unknown option 'max_tokens'" in wrong["error"]
    assert "5 rows, 2 failed" in result.err


def test_malformed_lines_are_told_with_their_numbers_and_the_others_are_done(
    cli, recipe, tiny_folder, tmp_path
) -> None:
    lines = [{"id": "a", "prompt": "x"}, '{"id": "b", ', "[1]", "", {"id": "a", "prompt": "again"}, {"prompt": "y"}]
    source = write(tmp_path / "in.jsonl", lines)
    result = cli("map", recipe(PLAIN), source, "out.jsonl", "-m", tiny_folder)
    assert result.code == 1
    for number, why in ((2, "expected a JSON object: "), (3, "got list"), (5, "the id 'a' is that of line 1")):
        assert f"in.jsonl:{number}: " in result.err
        assert why in result.err
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == ["a", 6]


def test_standard_input_and_output(recipe, tiny_folder, tmp_path) -> None:
    command = [sys.executable, "-m", "decodekit", "map", recipe(PLAIN), "-", "-", "-m", tiny_folder, "--unordered"]
    text = '{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}\n'
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert {json.loads(line)["id"] for line in done.stdout.splitlines()} == {"a", "b"}


def test_an_output_that_is_there_is_not_written_over(cli, recipe, tiny_folder, tmp_path) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": n, "prompt": "x"} for n in range(4)])
    output = write(tmp_path / "out.jsonl", [{"id": 1, "text": "kept"}])
    refused = cli("map", recipe(PLAIN), source, output, "-m", tiny_folder)
    assert refused.code == 2
    assert "exists; --resume goes on" in refused.err
    with output.open("a") as file:
        file.write('{"id": 2, "te')  # torn by a kill
    result = cli("map", recipe(PLAIN), source, output, "-m", tiny_folder, "--resume")
    assert result.code == 0, result.err
    assert [row["id"] for row in read(output)] == [1, 0, 2, 3]
    assert read(output)[0]["text"] == "kept"
    assert cli("map", recipe(PLAIN), source, output, "-m", tiny_folder, "--resume").code == 0
    assert len(read(output)) == 4
    other = write(tmp_path / "other.jsonl", ["no row"])
    assert "other.jsonl:1: no row of an earlier run" in cli("map", recipe(PLAIN), source, other, "--resume").err


def test_a_full_disk_is_told_and_tears_no_row(cli, recipe, tiny_folder, tmp_path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    source = write(tmp_path / "in.jsonl", [{"id": 1, "prompt": "x"}])
    result = cli("map", recipe(PLAIN), source, "/dev/full", "-m", tiny_folder)
    assert result.code == 2
    assert "/dev/full cannot be written: No space left" in result.err


def killed_and_resumed(command, output, rng, most):
    """Kill a run at a random moment, as often as ``most``; how often it was killed while rows were written."""
    kills = 0
    for _ in range(most):
        before = output.stat().st_size if output.exists() else 0
        process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
        wanted, deadline = before + rng.randint(1, 900), time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if output.exists() and output.stat().st_size >= wanted:
                break
            time.sleep(0.002)
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    return kills


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_with_exactly_the_missing_rows(kills, recipe, tiny_folder, tmp_path) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": f"r{n}", "prompt": "ab" * (n % 7 + 1)} for n in range(120)])
    output = tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "decodekit",
        "map",
        recipe(PLAIN),
        source,
        output,
        "-m",
        tiny_folder,
        "--slots",
        "2",
    ]
    command = [str(part) for part in [*command, "--resume"]]
    assert killed_and_resumed(command, output, random.Random(3), kills) == kills
    subprocess.run(command, check=True, capture_output=True)
    rows = read(output)
    assert [row["id"] for row in rows] == [f"r{n}" for n in range(120)]
    same = {}
    for row in rows:
        same.setdefault(int(row["id"][1:]) % 7, set()).add(row["text"])
    assert all(len(texts) == 1 for texts in same.values())


def test_processes_of_accelerate_share_the_rows(recipe, tiny_folder, tmp_path) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": n, "prompt": "ab" * (n % 5 + 1)} for n in range(23)])
    output = tmp_path / "out.jsonl"
    write(tmp_path / "out.jsonl.1-of-4", [{"id": 3, "line": 4, "text": "left by a killed run"}])
    # As accelerate launch does on GPUs; with --cpu it would ask for MPI.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    launch += ["--master_addr", "127.0.0.1", "--master_port", port]
    launch += ["-m", "decodekit", "map", recipe(PLAIN), source, output, "-m", tiny_folder, "--resume"]
    command = [str(part) for part in launch]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = read(output)
    assert [row["id"] for row in rows] == list(range(23))
    assert rows[3]["text"] == "left by a killed run"
    assert not list(tmp_path.glob("out.jsonl.*"))


def test_a_row_that_cannot_be_read_is_told_and_the_others_are_done(cli, recipe, tiny_folder, tmp_path) -> None:
    bad = [
        ({"price": None}, "the template does not fit what the row holds"),
        ({"price": 1, "generation": {"id": 1}}, "unknown option 'id'"),
        ({"price": 1, "generation": {"raw": True}}, "unknown option 'raw'"),
        ({"price": 1, "generation": {"prompt": "x"}}, "unknown option 'prompt'"),
        ({"price": 1, "generation": {"recipe": {}}}, "unknown option 'recipe'"),
    ]
    rows = [{"price": 2}, *(row for row, _ in bad), {"price": 3}]
    source = write(tmp_path / "in.jsonl", rows)
    result = cli("map", recipe(PLAIN), source, "out.jsonl", "-m", tiny_folder, "--template", "{price:.2f}")
    assert result.code == 1
    first, *failed, last = read(tmp_path / "out.jsonl")
    assert first["output_tokens"] == last["output_tokens"] == 5
    for row, (_, why) in zip(failed, bad, strict=True):
        assert why in row["error"]
    source = write(tmp_path / "prompts.jsonl", [{"prompt": 5}, {"prompt": "x"}])
    assert cli("map", recipe(PLAIN), source, "prompts.out", "-m", tiny_folder).code == 1
    wrong, right = read(tmp_path / "prompts.out")
    assert "a prompt is a text, a list of chat messages or token ids, got 5" in wrong["error"]
    assert right["output_tokens"] == 5


def test_rows_that_failed_are_tried_again(cli, recipe, tiny_folder, tmp_path) -> None:
    source = write(
        tmp_path / "in.jsonl", [{"id": 0, "prompt": "x"}, {"id": 1, "prompt": " "}, {"id": 2, "prompt": "y"}]
    )
    output = tmp_path / "out.jsonl"
    command = ("map", recipe(PLAIN), source, output, "-m", tiny_folder, "--resume")
    for _ in range(2):
        result = cli(*command)
        assert result.code == 1
        assert "1 failed" in result.err
        assert sorted((row["id"], "error" in row) for row in read(output)) == [(0, False), (1, True), (2, False)]
    write(source, [{"id": 0, "prompt": "x"}, {"id": 1, "prompt": "z"}, {"id": 2, "prompt": "y"}])
    assert cli(*command).code == 0
    assert sorted(row["id"] for row in read(output)) == [0, 1, 2]
    assert not any("error" in row for row in read(output))


@pytest.mark.parametrize("unordered", [False, True])
def test_rows_of_a_cluster_are_put_in_order(cli, recipe, tmp_path, monkeypatch, unordered) -> None:
    def backwards(recipe, lines, address, **options):
        yield from ({"id": line.id, "line": line.number, "text": ""} for line in reversed([*lines]))

    monkeypatch.setattr(cluster, "map_on_ray", backwards)
    source = write(tmp_path / "in.jsonl", [{"id": n, "prompt": "x"} for n in range(4)])
    options = ["--unordered"] if unordered else []
    assert cli("map", recipe(PLAIN), source, "out.jsonl", "--ray", "local", *options).code == 0
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == ([3, 2, 1, 0] if unordered else [0, 1, 2, 3])


def test_processes_wait_long_for_each_other_and_write_over_nothing(recipe, tmp_path, monkeypatch) -> None:
    asked = {}

    class State:
        is_main_process, num_processes = True, 2

        def __init__(self, **options) -> None:
            asked.update(options)

    monkeypatch.setattr(shards, "PartialState", State)
    monkeypatch.setattr(shards, "gather_object", lambda own: own)
    monkeypatch.setenv("WORLD_SIZE", "2")
    source, output = write(tmp_path / "in.jsonl", [{"prompt": "x"}]), write(tmp_path / "out.jsonl", [{"id": 1}])
    options = Options(None, [], None, False, False, False, None, 4, None, False)
    for kept in (output, write(tmp_path / "other.jsonl.0-of-2", [{"id": 1}])):
        with pytest.raises(InputError, match="exists; --resume goes on"):
            map_rows(str(recipe(PLAIN)), str(source), str(kept).removesuffix(".0-of-2"), options)
        assert read(kept) == [{"id": 1}]
    assert asked["timeout"] >= timedelta(days=1)
    State.num_processes = 1
    with pytest.raises(Refused, match="2 processes were started, and accelerate joined 1 of them"):
        map_rows(str(recipe(PLAIN)), str(source), str(tmp_path / "new.jsonl"), options)


@pytest.mark.parametrize(("done", "world", "left"), [(0, 1, 10), (4, 1, 6), (4, 2, 3), (5, 2, 3), (10, 4, 0)])
def test_the_rows_that_are_left_are_those_of_one_process(tmp_path, done, world, left) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": n} for n in range(10)])
    assert Input(str(source), {str(n) for n in range(done)}, (0, world)).count() == left


def test_a_file_that_is_not_there_is_named(tiny_folder, tmp_path, capsys) -> None:
    (tmp_path / "recipe.yaml").write_text("{}")
    paths = [str(tmp_path / name) for name in ("recipe.yaml", "in.jsonl", "out.jsonl")]
    with pytest.raises(SystemExit) as ended:
        main(["map", *paths, "-m", str(tiny_folder)])
    assert ended.value.code == 2
    assert f"no such file: {paths[1]!r} (relative paths start at" in capsys.readouterr().err
