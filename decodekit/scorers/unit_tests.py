"""The share of given tests that a candidate's Python code passes, run in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from decodekit.core.candidates import Candidate
from decodekit.core.protocols import Scorer
from decodekit.core.types import Need
from decodekit.core.units import parse_bytes

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

# The limits hold in the process itself, so that nothing has to run between fork and exec. A line a test that passed: what ran
# before the time was over counts.
_RUNNER = """
import resource, sys
seconds, memory = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
code, *tests = open("code", encoding="utf-8").read().split("\\0")
namespace = {"__name__": "candidate"}
exec(compile(code, "candidate", "exec"), namespace)
with open("passed", "w") as passed:
    for test in tests:
        try:
            exec(compile(test, "test", "exec"), dict(namespace))
        except BaseException:
            continue
        print(file=passed, flush=True)
"""


class UnitTests(Scorer):
    """Runs the code of the text's last fenced block, or the whole text where there is none, and then each test on it.

    What the model wrote RUNS ON THIS MACHINE WITH YOUR RIGHTS: in a process of its own, in an empty folder, without your
    environment, with limits on time, memory and file size, and with no sandbox around it. Use it only where any code may run.
    Posix only.
    """

    cost: ClassVar[str] = "1 process a candidate"
    needs: ClassVar[frozenset[Need | str]] = frozenset({Need.TOKENIZER})

    kind: Literal["unit_tests"] = "unit_tests"
    tests: tuple[str, ...] = Field(min_length=1, description="Python statements such as 'assert add(1, 2) == 3'")
    timeout_s: int = Field(5, ge=1, description="seconds for all tests of a candidate")
    memory: Annotated[int, BeforeValidator(lambda size: parse_bytes(size) if isinstance(size, str) else size)] = Field(
        512 << 20, ge=64 << 20, description="most bytes of a candidate's process, such as 512MiB"
    )

    def score(self, prompt: str, candidates: Sequence[Candidate]) -> Sequence[float]:
        return [self._passed(own.text) / len(self.tests) for own in candidates]

    def _passed(self, text: str) -> int:
        """How many tests the code of a text passes."""
        code = blocks[-1] if (blocks := _FENCED.findall(text)) else text
        with TemporaryDirectory() as folder:
            parts = (part.replace("\0", "") for part in (code, *self.tests))
            Path(folder, "code").write_text("\0".join(parts), encoding="utf-8", errors="replace")
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _RUNNER, str(self.timeout_s), str(self.memory)],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(self.timeout_s)
            finally:
                with suppress(ProcessLookupError):  # what it started goes too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            result = Path(folder, "passed")
            return len(result.read_bytes().splitlines()) if result.is_file() else 0
