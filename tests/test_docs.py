"""Every block of the documents under examples/ runs: Python in order, YAML as a recipe that decodes, commands one by one."""

import re
import shlex
from pathlib import Path

import pytest

import decodekit
from decodekit.core import registry
from decodekit.integrations import models
from decodekit.recipe import load_recipe
from decodekit.testing import tiny_model, tiny_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
PAGES = sorted(EXAMPLES.rglob("*.md"))
NAMES = [str(page.relative_to(EXAMPLES)) for page in PAGES]
OTHERS = ("pip ", "pytest ")
"""Commands of other programs, and with them the plugin that they install: tested where plugins are scaffolded."""
EXTENDED = {
    "first.yaml": "rules: [{kind: temperature, t: 0.8}]\ngeneration: {max_new_tokens: 8, do_sample: true, seed: 1}\n"
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Tiny models stand in for whichever one a page would load."""
    model, tokenizer = tiny_model("dense"), tiny_tokenizer()
    monkeypatch.setattr(models, "load_model", lambda *_, **__: (model, tokenizer))
    monkeypatch.chdir(tmp_path)
    return model, tokenizer


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_runs_in_order(page, tiny, capsys) -> None:
    scope: dict = {"__name__": page.stem}
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name}, block {number}", "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_yaml_is_a_recipe_that_decodes(page, tiny, tmp_path) -> None:
    for name, text in EXTENDED.items():
        (tmp_path / name).write_text(text)
    for block in blocks(page, "yaml"):
        (tmp_path / "recipe.yaml").write_text(block)
        recipe = load_recipe("recipe.yaml")
        cache = recipe.to_dict().get("cache") or {}
        short = {"generation": {"max_new_tokens": 8, "suppress_tokens": [1]}}
        if cache.get("budget"):
            short["cache"] = {"budget": "1MiB"}
        [output] = decodekit.load(recipe, **short).run(*tiny, ["Who won 3 times?"])
        # A constraint may need more than eight tokens, and a scorer may find nothing to like.
        assert output.error is None or output.finish_reason == "error", output
        assert output.token_ids or output.error


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_run(page, tiny, tmp_path, capfd) -> None:
    from decodekit.cli import main

    for name, text in EXTENDED.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "vote.yaml").write_text(
        "extends: first.yaml\nstrategy: {kind: self_consistency, n: 2, extract: last_number}\n"
    )
    (tmp_path / "data.jsonl").write_text("".join(blocks(page, "json")))
    (tmp_path / "recipe.yaml").write_text("generation: {max_new_tokens: 6}\n")
    tiny[0].config.save_pretrained(tmp_path / "MODEL")
    if recipes := blocks(page, "yaml"):
        (tmp_path / f"{page.stem}.yaml").write_text(recipes[0])
    for line in "".join(blocks(page, "bash")).splitlines():
        command = line.partition("  #")[0].strip()
        if command.startswith(OTHERS) or "{kind: hush" in command:
            continue
        program, *arguments = shlex.split(command)
        assert program == "decodekit", line
        if arguments[0] == "run":
            arguments += ["--set", "generation.max_new_tokens=8"]
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        # A tiny model may find no output that a strategy accepts: 1 is a row that failed, 2 a command that is wrong.
        assert (caught.value.code or 0) <= (arguments[0] == "run"), (line, capfd.readouterr().err)


def test_every_strategy_has_a_page_with_a_picture_and_a_source() -> None:
    own = [info.kind for info in registry.inventory() if (info.group, info.distribution) == ("strategies", "decodekit")]
    assert sorted(own) == sorted(page.stem for page in (EXAMPLES / "strategies").glob("*.md"))
    for kind in own:
        text = (EXAMPLES / f"strategies/{kind}.md").read_text()
        assert all(f"**{part}.**" in text for part in ("When", "Cost", "Paper"))
        assert "arxiv.org/abs/" in text
        assert load_recipe_of(text).strategy.kind == kind


def load_recipe_of(text: str):
    import yaml

    return load_recipe(yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0]))


@pytest.mark.parametrize("page", [*PAGES, EXAMPLES.parent / "README.md"], ids=[*NAMES, "README.md"])
def test_what_a_page_links_to_is_there(page) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_gallery_shows_every_recipe() -> None:
    text = (EXAMPLES / "gallery.md").read_text()
    assert all(f"(recipes/{path.name})" in text for path in (EXAMPLES / "recipes").glob("*.yaml"))
