"""A constraint that looks heavy is compiled in a worker process first, under limits of time and memory.

The worker is started when it is first needed, and stays. It compiles over single bytes, so that no tokenizer is sent; what it
finds wrong besides is found again, and told, where the constraint is compiled for good. Linux only: other systems cannot
limit what a process holds.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from threading import Lock

import torch

from decodekit.core.constraint import mask_words
from decodekit.core.errors import UnsupportedConstraint
from decodekit.core.protocols import Constraint
from decodekit.core.vocabulary import Vocabulary

if sys.platform != "win32":
    import resource

CPU_SECONDS = 2
MEMORY_BYTES = 512 * 2**20
_LEAST_ROOM_BYTES = 192 * 2**20
_START_SECONDS, _STUCK_SECONDS = 120.0, 30.0
_MOST_CHARACTERS, _MOST_COMBINED = 10_000, 40
_COMBINED = re.compile(r'"(?:anyOf|oneOf|allOf|not|if|any_of|all_of|none_of)"|\(\?<?[=!]')
_REPEATED_OFTEN = re.compile(r'\{\d*,?\d{4,}\}|"(?:min|max)(?:Length|Items|Properties)": ?\d{5,}')


def vet(constraint: Constraint) -> None:
    """Let the worker compile a constraint that looks heavy; where no process can be started, nothing happens.

    Raises:
        UnsupportedConstraint: it takes too much time or memory.
    """
    # With the options of what it is made of, which the types of its fields do not name.
    options = json.dumps(constraint.model_dump(mode="json", serialize_as_any=True, by_alias=True))
    kind = type(constraint)
    if _looks_heavy(options) and _compiles(json.dumps([kind.__module__, kind.__qualname__, options])) is False:
        raise UnsupportedConstraint(
            f"constraint {constraint.kind!r} takes more than {CPU_SECONDS} s of CPU time or {MEMORY_BYTES // 2**20} MiB to "
            "compile; make it smaller",
            ("size",),
        )


def _looks_heavy(options: str) -> bool:
    return (
        len(options) > _MOST_CHARACTERS
        or len(_COMBINED.findall(options)) > _MOST_COMBINED
        or _REPEATED_OFTEN.search(options) is not None
    )


@lru_cache(maxsize=256)
def _compiles(described: str) -> bool | None:
    with _lock:
        return _worker.compiles(described.encode())


class _Worker:
    """The process, or that there can be none."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._works = sys.platform == "linux" and bool(sys.executable)

    def compiles(self, described: bytes) -> bool | None:
        """Whether a constraint compiles within the limits; ``None`` where that cannot be told."""
        try:
            return self._ask(described)
        except BaseException:
            self.stop()  # an interrupt: the answer that is still to come would be taken for the next one's
            raise

    def _ask(self, described: bytes) -> bool | None:
        if self._process is None and self._works:
            self._start()
        if self._process is None:
            return None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(described).to_bytes(8, "little") + described)
            self._process.stdin.flush()
        except OSError:
            self.stop()
            return None
        done = self._answers(_STUCK_SECONDS)
        if not done:
            self.stop()
        return done

    def _start(self) -> None:
        code = f"from {__name__} import serve; serve()"
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            )
        except OSError:
            self._works = False
            return
        if not self._answers(_START_SECONDS):
            self._works = False
            self.stop()

    def _answers(self, seconds: float) -> bool:
        """Whether a byte comes in time; it ends where the process does."""
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        return bool(ready) and self._process.stdout.read(1) == b"."

    def stop(self) -> None:
        """End the process; the next constraint starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


_worker, _lock = _Worker(), Lock()
atexit.register(_worker.stop)


def serve() -> None:
    """The worker: reads constraints, compiles each, and writes a dot; ends with its input, or beyond a limit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given, told = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print is no answer
    told.write(b".")
    vocabulary = byte_vocabulary()
    while length := int.from_bytes(given.read(8), "little"):
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        try:
            module, name, options = json.loads(given.read(length))
            constraint: Constraint = getattr(importlib.import_module(module), name).model_validate_json(options)
            _limit()
            state = constraint.compile(vocabulary).start()
            state.mask(torch.zeros(1, mask_words(vocabulary.width), dtype=torch.int32), 0)
        except MemoryError:
            return
        except Exception:  # whoever compiles it for good says what is wrong
            pass
        told.write(b".")


def byte_vocabulary() -> Vocabulary:
    """The single bytes and an EOS: over these a constraint compiles where there is no model and no tokenizer."""
    return Vocabulary((*(bytes([byte]) for byte in range(256)), None), False, (256,), _Bytes())


class _Bytes:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def _limit() -> None:
    """Set the limits of this process for what comes next: plugins are imported, which does not count."""
    # A limit of CPU time counts whole seconds since the process began, and would let a third one pass.
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    sizes = dict(re.findall(r"(VmData|RssFile):\s+(\d+) kB", Path("/proc/self/status").read_text()))
    data, files = 1024 * int(sizes["VmData"]), 1024 * int(sizes["RssFile"])
    # A torch for CUDA takes all of it by being imported; what is compiled gets some even so.
    room = max(_LEAST_ROOM_BYTES, MEMORY_BYTES - data - files)
    resource.setrlimit(resource.RLIMIT_DATA, (data + room, resource.RLIM_INFINITY))
