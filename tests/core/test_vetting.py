import json
import os
import subprocess
import sys

import pytest
import torch

from decodekit.constraints.json_schema import JsonSchema
from decodekit.constraints.regex import Regex
from decodekit.core import registry, vetting
from decodekit.core.errors import UnsupportedConstraint
from decodekit.core.protocols import Constraint

linux = pytest.mark.skipif(sys.platform != "linux", reason="the worker needs Linux")


@pytest.fixture
def worker(monkeypatch):
    """A worker of the test's own."""
    own = vetting._Worker()
    monkeypatch.setattr(vetting, "_worker", own)
    vetting._compiles.cache_clear()
    yield own
    own.stop()
    vetting._compiles.cache_clear()


class Endless(Constraint):
    """Takes time or memory without end, or nothing; long enough to be looked at."""

    kind: str = "endless"
    takes: str
    text: str = "x" * 20_000

    def compile(self, vocabulary):
        held = []
        while self.takes != "nothing":
            if self.takes == "memory":
                held.append(bytearray(2**20))
        raise UnsupportedConstraint("it takes nothing", ("size",))


def test_ordinary_constraints_start_no_worker(worker) -> None:
    vetting.vet(Regex(pattern=r"(\d{3}-)+the end(ing)?[.!]|abc"))
    vetting.vet(JsonSchema(schema={"type": "object", "properties": {"a": {"type": "string", "maxLength": 500}}}))
    assert worker._process is None


@linux
@pytest.mark.parametrize("takes", ["time", "memory"])
def test_what_takes_too_much_is_refused_and_the_next_gets_a_new_worker(worker, monkeypatch, takes) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(__file__).rpartition("/")[0]])
    monkeypatch.setattr(Endless, "__module__", "test_vetting")
    monkeypatch.setitem(sys.modules, "test_vetting", sys.modules[__name__])
    with pytest.raises(UnsupportedConstraint, match="constraint 'endless' takes more than 2 s of CPU time or 512 MiB"):
        vetting.vet(Endless(takes=takes))
    assert worker._process is None
    vetting.vet(Regex(pattern="a" * 20_000))
    assert worker._process is not None


TAKING = """
import json, os, resource
from decodekit.core import vetting
from tests.core.test_vetting import Endless

def used():
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime

def measure(takes):
    "CPU seconds of the worker for this constraint."
    vetting.vet(Endless(takes="nothing", text=takes * 20_000))  # imports what the measured one needs
    with open(f"/proc/{vetting._worker._process.pid}/stat") as file:
        ticks = file.read().rpartition(")")[2].split()[11:13]
    before = used() + sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    try:
        vetting.vet(Endless(takes=takes))
    except ValueError:
        return used() - before

if __name__ == "__main__":
    seconds = [measure("time"), measure("memory")]
    print(json.dumps([*seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))
"""


@linux
def test_a_worker_is_ended_at_its_limits(tmp_path) -> None:
    (tmp_path / "taking.py").write_text(TAKING)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "taking.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    in_time, in_memory, mebibytes = json.loads(done.stdout)
    assert 1.9 < in_time < 2.9  # whole seconds, as limits of CPU time count, would let a third one pass
    assert in_memory < 2.9
    if not torch.version.cuda:  # importing such a torch takes the memory
        assert 300 < mebibytes <= 512


@linux
@pytest.mark.parametrize("place", [0, 1])
def test_an_interrupt_leaves_no_answer_behind(worker, monkeypatch, place) -> None:
    """As the worker starts, and as it compiles."""
    honest, calls = vetting._Worker._answers, []

    def interrupted(self, seconds):
        calls.append(seconds)
        if len(calls) == place + 1:
            raise KeyboardInterrupt
        return honest(self, seconds)

    monkeypatch.setattr(vetting._Worker, "_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        vetting.vet(Regex(pattern="a" * 20_000))
    assert worker._process is None
    vetting.vet(Regex(pattern="a" * 20_000))
    assert len(calls) == place + 3
    assert worker._process.poll() is None


@linux
def test_the_worker_stays_and_a_verdict_is_kept(worker) -> None:
    vetting.vet(Regex(pattern="a" * 20_000))
    process = worker._process
    vetting.vet(Regex(pattern="b" * 20_000))
    assert worker._process is process
    worker.stop()
    vetting.vet(Regex(pattern="b" * 20_000))
    assert worker._process is None


def test_where_no_process_can_be_started_nothing_is_vetted(worker, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    vetting.vet(Regex(pattern="a" * 20_000))
    assert worker._process is None
    assert not worker._works


@linux
def test_what_a_combination_is_made_of_counts(worker) -> None:
    inner = [{"kind": "choice", "choices": ["a"]}, {"kind": "regex", "pattern": "a" * 20_000}]
    vetting.vet(registry.create("constraints", {"kind": "any_of", "constraints": inner[:1]}))
    assert worker._process is None
    vetting.vet(registry.create("constraints", {"kind": "any_of", "constraints": inner}))
    assert worker._process is not None


BOMBS = {
    "a bomb inside": {
        "kind": "all_of",
        "constraints": [
            {"kind": "regex", "pattern": "[a-z]+"},
            {"kind": "regex", "pattern": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
        ],
    },
    "nested quantifiers": {"kind": "regex", "pattern": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    "a million repetitions": {"kind": "regex", "pattern": "(a|b){1000000}c"},
    "a reference to nowhere": {
        "kind": "json_schema",
        "schema": {"$ref": "#/$defs/none", "$defs": {"a": {"$ref": "#"}}},
    },
    "a reference to itself": {"kind": "json_schema", "schema": {"$ref": "#"}},
    "50 MB": {"kind": "json_schema", "schema": {"enum": ["x" * 50_000_000]}},
    "exponential look-ahead": {
        "kind": "regex",
        "pattern": "".join(f"(?=.*{sign}.{{14}}{sign})" for sign in "abcdefghij") + ".*",
    },
    "many alternatives": {
        "kind": "json_schema",
        "schema": {"allOf": [{"anyOf": [{"required": [f"{a}{b}"]} for b in "abcdef"]} for a in "abcdefghijklmnop"]},
    },
}
REFUSE = """
import json, resource, sys
import decodekit
from decodekit.testing import tiny_tokenizer
tokenizer = tiny_tokenizer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, bomb in json.loads(sys.stdin.read()).items():
    try:
        verdict = decodekit.accepts(bomb, "ab" * 30, tokenizer)
    except (decodekit.InputError, decodekit.UnsupportedConstraint):
        verdict = "refused"
    print(json.dumps([name, verdict]))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([grown // 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024]))
"""


@linux
def test_bombs_are_refused_within_little_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSE],
        input=json.dumps(BOMBS),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *verdicts, (own, workers) = map(json.loads, done.stdout.splitlines())
    assert [name for name, _ in verdicts] == [*BOMBS]
    # States of a look-ahead are made as they are met: a text may be judged before they are too many.
    assert {name for name, verdict in verdicts if verdict != "refused"} <= {"exponential look-ahead"}, verdicts
    assert own <= 512
    if not torch.version.cuda:  # importing such a torch takes most of it
        assert workers <= 512
