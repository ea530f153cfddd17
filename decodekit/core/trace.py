"""The trace: a JSONL file of what decoding did, one header, then a record a token and a record an event.

Version 1. Header: ``{"decodekit": version, "trace": 1, "model", "recipe", "seed", "raw", "prompt_ids", "prompts", "inputs",
"rows": [{"prompt", "seed", "sample"}, ...]}``: whether prompts skipped the chat template, then an entry a row, of ``prompts``
the texts or chats and of ``inputs`` what came with them (a context, for example). A replay has ``replay``: ``{"of", "row",
"at", "set"}``, the trace and row that it follows up to token ``at``, and what is set differently.

Token record: ``{"type": "token", "prompt", "row", "position", "id", "text", "prob", "entropy", "legal", "shift", "branches",
"alternatives"}``, ``draft``, the number of the node that it is, where it was drafted, and what the strategy notes
(``premature_layer``, ``divergence``, ...). Entropy is in nats, and so is shift, how far the strategy moved the model's own
distribution: the Jensen-Shannon divergence between the two before any rule, from 0 to log 2. ``branches`` are the
distributions of the model in each branch, ``alternatives`` those after the strategy and after each rule: ``{"branch" or
"stage": name, "prob": of this token, "legal": how many tokens may be chosen, "top": [[id, text, prob], ...]}``.

Event record: ``{"type": "event", "event", ...}``:

- ``draft``: what was forwarded behind a row, before its tokens: ``row, position, tokens: [[id, text], ...], parents`` (-1 is
  the row itself), ``accepted``: nodes, ``forced``: by a constraint.
- ``search``: a step of a search: ``row, position, hypotheses``: those that live on, each with its ``parent`` in the step
  before, its total ``logprob`` and what a token record holds; ``ended``: those that are over, with ``score`` and ``reason``.
- ``cache``: after a forward: ``step, caches: [{"model", "rows", "tokens", "groups": [{"used", "cached", "free",
  "block_size", "layers"}, ...]}, ...]``.
- ``candidates``: what was chosen from: ``row, candidates``, what the strategy reports, ``rows`` and ``ranking`` of the
  candidates, a matrix of ``utilities``.
- ``finished``: ``row, finish_reason``, and ``error``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from decodekit.core.errors import InputError

TRACE_VERSION = 1
_MADE = "give a trace, which decodekit run RECIPE PROMPT --trace FILE writes"


class TraceWriter:
    """Writes a trace line by line, so that an interrupted run keeps what it had.

    Args:
        path: the file to write.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._file: IO[str] = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  closed by close()
        except OSError as error:
            raise InputError(f"the trace cannot be written to {str(path)!r}: {error.strerror}") from error

    def header(self, **fields: Any) -> None:
        """The first line."""
        self._write({"decodekit": version("decodekit"), "trace": TRACE_VERSION, **fields})

    def token(self, **fields: Any) -> None:
        """One emitted token."""
        self._write({"type": "token", **fields})

    def event(self, event: str, **fields: Any) -> None:
        """Something that is not a token: an end, candidates, blocks."""
        self._write({"type": "event", "event": event, **fields})

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False, default=repr) + "\n")
        self._file.flush()


def read_trace(path: str | Path) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """The header and the records of a trace; a record that was cut off is an error when its turn comes.

    Raises:
        InputError: not a trace, or one of another version.
    """
    try:
        # Not splitlines: it also cuts at U+2028 and others, which JSON leaves as they are.
        lines = Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; {_MADE}") from error
    except (OSError, UnicodeError) as error:
        raise InputError(f"the trace {str(path)!r} cannot be read: {error}") from error
    try:
        header = json.loads(lines[0])
        found = header["trace"]
    except (IndexError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{path} is not a decodekit trace: its first line has no trace version; {_MADE}") from error
    if found != TRACE_VERSION:
        raise InputError(f"{path} is a trace of version {found}; this decodekit reads version {TRACE_VERSION}")
    return header, (_record(line, f"{path}:{number}") for number, line in enumerate(lines[1:], start=2))


def _record(line: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: no record of a trace: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"{place}: expected a record, a JSON object, got {type(record).__name__}")
    return record
