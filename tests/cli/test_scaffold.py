import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import decodekit


@pytest.mark.integration
def test_an_exported_folder_runs_with_generate(cli, recipe, tiny_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = recipe(
        "strategy: {kind: dola, layers: [0, 1], relative_top: 0.0}\n"
        "rules: [{kind: logit_bias, bias: {the: 0.5}}]\n"
        "generation: {max_new_tokens: 7, suppress_tokens: [1]}\n"
    )
    result = cli("export", path, tmp_path / "shared")
    assert result.code == 0, result.err
    files = {str(file.relative_to(tmp_path / "shared")) for file in (tmp_path / "shared").rglob("*") if file.is_file()}
    assert files == {"README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
    ids = tokenizer("Who won?", return_tensors="pt").input_ids
    expected = model.generate(ids, custom_generate=decodekit.load(path).bind(tokenizer=tokenizer))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    output = model.generate(
        ids,
        custom_generate=str(tmp_path / "shared"),
        trust_remote_code=True,
        tokenizer=tokenizer,
        streamer=streamer,
    )
    assert torch.equal(output, expected)
    assert output.shape[1] == ids.shape[1] + 7
    assert "".join(streamer) == tokenizer.decode(output[0, ids.shape[1] :])
    stop = tokenizer.decode(expected[0, ids.shape[1] + 2])
    stopped = model.generate(
        ids,
        custom_generate=str(tmp_path / "shared"),
        trust_remote_code=True,
        tokenizer=tokenizer,
        stop_strings=[stop],
    )
    assert stopped.shape[1] <= ids.shape[1] + 3
    shorter = model.generate(
        ids, custom_generate=str(tmp_path / "shared"), trust_remote_code=True, tokenizer=tokenizer, max_new_tokens=2
    )
    assert shorter.shape[1] == ids.shape[1] + 2


@pytest.mark.integration
def test_a_recipe_travels_in_the_models_generation_config(cli, recipe, tiny_folder, tmp_path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
    decoder = decodekit.load({"strategy": {"kind": "dola", "layers": [0, 1]}, "generation": {"max_new_tokens": 5}})
    model.generation_config.decodekit = decoder.recipe.to_dict()
    for own in (model, tokenizer):
        own.save_pretrained(tmp_path / "shared")
    result = cli("run", "shared/generation_config.json", "Who won?", "-m", "shared", "--json")
    assert result.code == 0, result.err
    [expected] = decoder.run(model, tokenizer, ["Who won?"])
    assert result.json[0]["token_ids"] == expected.token_ids
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "shared")
    inputs = tokenizer("Who won?", return_tensors="pt")
    carried = decodekit.load(tmp_path / "shared/generation_config.json")
    assert again.generate(**inputs, custom_generate=carried)[0].tolist()[-5:] == expected.token_ids
    bare = cli("run", tiny_folder / "generation_config.json", "a", "-m", tiny_folder)
    assert bare.code == 2
    assert "holds no recipe" in bare.err


def test_a_text_of_the_recipe_cannot_become_code(cli, recipe, tmp_path) -> None:
    words = "'''+str(__import__('os').system('touch PWNED'))+r'''"
    cli("export", recipe(json.dumps({"rules": [{"kind": "bad_words", "words": [words]}]})), tmp_path / "shared")
    code = (tmp_path / "shared/custom_generate/generate.py").read_text()
    scope: dict = {}
    exec(compile(code, "generate.py", "exec"), scope)
    assert scope["RECIPE"]["rules"][0]["words"] == [words]
    assert not (tmp_path / "PWNED").exists()


def test_an_exported_folder_names_the_plugins_it_needs(cli, recipe, tmp_path) -> None:
    cli("export", recipe("rules: [top_n_sigma]\ngeneration: {do_sample: true}\n"), tmp_path / "shared")
    requirements = (tmp_path / "shared/custom_generate/requirements.txt").read_text().split()
    assert requirements == [f"decodekit>={decodekit.__version__}", "decodekit-nsigma>=0.1.0"]


def test_an_exported_folder_names_the_plugins_that_others_nest(cli, recipe, tmp_path) -> None:
    text = "strategy: {kind: mbr, n: 2, utility: exact, inner: sled}\ngeneration: {do_sample: true}\n"
    cli("export", recipe(text), tmp_path / "shared")
    assert "decodekit-sled>=" in (tmp_path / "shared/custom_generate/requirements.txt").read_text()


def test_a_folder_that_is_not_empty_is_left_alone(cli, recipe, tmp_path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/keep").write_text("x")
    result = cli("export", recipe("{}\n"), "full")
    assert result.code == 2
    assert "'full' is already there and not an empty folder" in result.err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["keep"]


NEW = {
    "rule": "hush",
    "strategy": "two_words",
    "constraint": "pin",
    "drafter": "echo",
    "scorer": "brief",
    "utility": "overlap",
}


def test_new_plugins_install_and_their_tests_pass(cli, tmp_path) -> None:
    for kind, name in NEW.items():
        result = cli("new", kind, name)
        assert result.code == 0, result.err
    folders = [str(tmp_path / f"decodekit-{name.replace('_', '-')}") for name in NEW.values()]
    site = tmp_path / "site"
    # hatchling is here already; an environment to build in would be made for each of them.
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*install, *folders], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", *folders],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert tests.returncode == 0, tests.stdout
    groups = ("rules", "strategies", "constraints", "drafters", "scorers", "utilities")
    named = [*zip(groups, NEW.values(), strict=True)]
    code = f"from decodekit.core import registry; print(*(registry.load(*one).__name__ for one in {named}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert loaded.stdout.split() == ["Hush", "TwoWords", "Pin", "Echo", "Brief", "Overlap"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rule", "Bad-Name"), "lower-case letters, digits and underscores"),
        (("rule", "class"), "'class' is a keyword of Python"),
        (("rule", "my-rule"), "did you mean my_rule?"),
        (("rulez", "fine"), "unknown plugin kind 'rulez': did you mean 'rule'"),
        (("rule", "top_p"), "rule 'top_p' is already in decodekit"),
    ],
)
def test_names_that_cannot_be_used_say_why(cli, arguments, message) -> None:
    result = cli("new", *arguments)
    assert result.code == 2
    assert message in result.err


def test_the_templates_are_packaged() -> None:
    root = Path(decodekit.__file__).parent / "cli/templates"
    assert len(list(root.rglob("*.in"))) >= 9
