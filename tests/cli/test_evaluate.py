import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("task", "metric"), [("capitals", "acc,none"), ("sums", "exact_match,last_number")])
def test_a_task_that_needs_no_download(cli, recipe, tiny_folder, monkeypatch, tmp_path, task, metric) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = recipe("generation: {max_new_tokens: 4, suppress_tokens: [1]}\n")
    monkeypatch.chdir(ROOT)
    result = cli("eval", path, "--task", f"examples/tasks/{task}.yaml", "--limit", 4, "-m", tiny_folder, "--json")
    assert result.code == 0, result.err
    assert 0 <= result.json["results"][task][metric] <= 1
    assert result.json["recipe"]["generation"]["max_new_tokens"] == 4


def test_the_answers_of_the_example_tasks_are_among_their_choices() -> None:
    for line in (ROOT / "examples/tasks/capitals.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert 0 <= row["answer"] < len(set(row["choices"])) == 4
