import re
import shutil
from pathlib import Path

from decodekit.cli.tables import refresh
from decodekit.recipe import load_recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_tables_are_those_of_the_registry() -> None:
    plugins = (ROOT / "examples/plugins.md").read_text(encoding="utf-8")
    assert refresh(README) == README, "run: make tables"
    assert refresh(plugins) == plugins, "run: make tables"
    assert "| `dola` |" in README
    assert "| `top_p` |" in plugins


def test_every_python_block_runs_in_order(demo, capsys) -> None:
    scope: dict = {"__name__": "readme"}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"README.md, block {number}", "exec"), scope)
    printed = capsys.readouterr().out
    assert len(printed) > 100
    assert printed.rstrip().endswith("blocks found")
    assert int(printed.split()[-3]) > 0


def test_every_yaml_block_is_a_recipe(tmp_path) -> None:
    shutil.copytree(ROOT / "examples/recipes", tmp_path / "examples/recipes")
    path = tmp_path / "recipe.yaml"
    recipes = []
    for text in blocks("yaml"):
        path.write_text(text)
        recipes.append(load_recipe(path))
    assert [recipe.strategy.kind for recipe in recipes] == ["dola", "self_consistency", "beam"]
    assert recipes[0].strategy.layers == "high"
    assert [rule.kind for rule in recipes[0].rules] == ["repetition_penalty", "top_p"]
    assert recipes[1].drafter.kind == "ngram"
    assert recipes[2].constraint.kind == "json_schema"


def test_the_readme_stays_short() -> None:
    assert README.count("\n") < 250
