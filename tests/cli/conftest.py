import io
import json

import pytest

from decodekit.cli import main


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        assert self.out, self.err
        return json.loads(self.out)


@pytest.fixture
def cli(tmp_path, monkeypatch, capfd):
    """Run the command line, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: object, stdin: str = "") -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Result(int(caught.value.code or 0), out, err)

    return run


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe file and name it."""

    def write(text: str, name: str = "recipe.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write
