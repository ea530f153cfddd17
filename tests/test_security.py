"""What the README says is protected."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def calls() -> list[tuple[str, str, set[str]]]:
    """(file, function, keywords that are True) of every call in the package."""
    found = []
    for path in sorted((ROOT / "decodekit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                on = {
                    word.arg
                    for word in node.keywords
                    if isinstance(word.value, ast.Constant) and word.value.value is True
                }
                found.append((str(path.relative_to(ROOT)), ast.unparse(node.func), on))
    return found


def test_nothing_is_pickled_and_no_code_is_loaded_with_weights() -> None:
    for path, function, on in calls():
        module, _, name = function.rpartition(".")
        assert not (
            module in ("pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve") and name != "UnpicklingError"
        ), path
        assert function not in ("torch.save", "yaml.load", "yaml.unsafe_load", "eval"), path
        if function == "torch.load":
            assert "weights_only" in on, path
        if name == "from_pretrained" and "trust_remote_code" in on:
            raise AssertionError(f"{path} runs code of a model's repository")


def test_python_runs_text_only_where_that_is_its_task() -> None:
    assert {path for path, function, _ in calls() if function == "exec"} == {"decodekit/testing/mutants/__init__.py"}


def test_checking_a_recipe_imports_the_plugins_it_names_and_no_others(tmp_path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rules: [{kind: top_p, p: 0.9}]\n")
    code = (
        "import sys, decodekit; decodekit.load(sys.argv[1]); "
        "print(*sorted(name for name in sys.modules if name.startswith(('decodekit.rules.', 'decodekit.constraints.', "
        "'decodekit.drafters.', 'decodekit_'))))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(recipe)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["decodekit.rules.top_p"]


def test_the_readme_says_what_is_not_protected() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    security = readme.split("## Security\n")[1].split("\n## ")[0]
    for words in ("no process can sandbox", "leaks by timing", "salt", "DECODEKIT_PLUGINS", "Nothing is pickled"):
        assert words in security
