"""The wheel in an environment of its own: what users get, not what lies in the checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import decodekit

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a new environment with the wheel; what it needs is taken from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    # Behind the wheel on the path, so that neither the checkout nor an editable install is found first.
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(paths) + "\n")
    return folder / "bin" / "python"


def run(python, *arguments, cwd):
    command = [str(python), "-m", "decodekit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_everything_that_is_data_is_inside(wheel) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"decodekit/_grammars/{path.name}" for path in (ROOT / "grammars").iterdir() if path.is_file()} <= names
    assert "decodekit/py.typed" in names
    assert {f"decodekit/view/page.{suffix}" for suffix in ("html", "css", "js")} <= names
    templates = (ROOT / "decodekit/cli/templates").rglob("*.in")
    assert {str(path.relative_to(ROOT)) for path in templates} <= names
    assert not any(name.startswith(("tests/", "examples/", "plugins/")) for name in names)


def test_it_runs_where_nothing_else_is(python, tmp_path) -> None:
    code = "import decodekit, sys; print(decodekit.__file__)"
    home = subprocess.run([str(python), "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert not Path(home.strip()).is_relative_to(ROOT)
    assert run(python, "--version", cwd=tmp_path).stdout == f"decodekit {decodekit.__version__}\n"
    (tmp_path / "sql.yaml").write_text("constraint: {kind: grammar, name: sql_select}\n")
    checked = run(python, "check", "sql.yaml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    rows = json.loads(run(python, "plugins", "--json", cwd=tmp_path).stdout)
    # Of other distributions, those that are installed to be edited cannot be imported here.
    own = [row for row in rows if row["distribution"] == "decodekit"]
    assert len(own) > 50
    assert [row["kind"] for row in own if row["status"] != "ok"] == []
    code = (
        "from decodekit.core import registry; from decodekit.testing import tiny_tokenizer; import decodekit;"
        "own = registry.create('constraints', {'kind': 'grammar', 'name': 'sql_select'});"
        "print(decodekit.accepts(own, 'SELECT a FROM b', tiny_tokenizer()))"
    )
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert found.stdout.strip() == "True", found.stderr


@pytest.mark.parametrize(
    ("shell", "line"),
    [("bash", "complete -o default"), ("zsh", "#compdef"), ("fish", "complete --command")],
)
def test_shells_are_told_how_to_complete(python, tmp_path, shell, line) -> None:
    command = [str(python), "-m", "decodekit", "--show-completion", shell]
    # Otherwise typer takes the shell that runs the tests, if any does.
    env = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, env=env)
    assert line in shown.stdout, shown.stderr
    assert "decodekit" in shown.stdout.lower()
