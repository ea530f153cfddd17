import time

from decodekit.scorers.unit_tests import UnitTests
from tests.scorers.texts import scores

TESTS = ("assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(1, 1) == 2")


def test_the_share_of_tests_that_pass() -> None:
    right = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds."
    partly = "def add(a, b):\n    return int(a) + int(b)"
    twice = "```\nwrong(\n```\nor rather\n```py\ndef add(a, b):\n    return a + b\n```"
    found = scores(UnitTests(tests=TESTS), right, partly, twice, "def add(a", "", "import sys\nsys.exit(0)")
    assert found == [1, 2 / 3, 1, 0, 0, 0]


def test_a_test_sees_nothing_of_another() -> None:
    assert scores(UnitTests(tests=("x = 1", "assert 'x' not in globals()")), "") == [1]


def test_time_and_memory_are_limited(tmp_path) -> None:
    left = tmp_path / "left"
    child = f"import subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 3; touch {left}'])"
    scorer = UnitTests(tests=("assert True", "while True: pass"), timeout_s=1)
    started = time.monotonic()
    assert scores(scorer, "", "while True: pass", child) == [0.5, 0, 0.5]
    assert time.monotonic() - started < 30
    assert scores(UnitTests(tests=("x = bytearray(1 << 30)",), memory="128MiB"), "") == [0]
    assert not left.exists()


def test_your_environment_is_not_its_own(monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    assert scores(UnitTests(tests=("import os; assert 'SECRET' not in os.environ",)), "") == [1]
