"""The rows that recipes are compared on, and what was decoded of them so far."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodekit.core.errors import InputError

REFERENCES = ("reference", "final", "answer", "target", "output")
PROMPTS = ("prompt", "question", "input", "text")
EXPECTED = 'a JSON object such as {"prompt": "What is 3 + 4?", "answer": "7"}'
INPUTS = ("context", "negative_prompt")


@dataclass(frozen=True)
class Row:
    """A prompt with whatever strategies need beside it, and what is expected."""

    prompt: dict[str, Any]
    reference: str


def read_rows(path: Path, *, template: str | None, reference: str | None, limit: int | None) -> list[Row]:
    """The rows of a JSONL file.

    Args:
        path: the file.
        template: the prompt, fields of a row in braces; the row's prompt or question if left out.
        reference: the field with what is expected; the first of ``REFERENCES`` that the first row has if left out.
        limit: use so many.

    Raises:
        InputError: the file cannot be read or is empty, or a line is no object or lacks a field; names the line.
    """
    try:
        # Not splitlines: it also cuts at U+2028 and others, which JSON leaves as they are.
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")[:limit]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"the data file {str(path)!r} cannot be read ({why}): give {EXPECTED} on every line"
        ) from error
    if lines == [""]:
        raise InputError(f"the data file {str(path)!r} is empty: give {EXPECTED} on every line")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: expected {EXPECTED}, got {line[:60]!r}: {error}") from error
        if not isinstance(fields, dict):
            raise InputError(f"{path}:{number}: expected {EXPECTED}, got {line[:60]!r}")
        where = f"{path}:{number}"
        text = template or "{" + _first(fields, PROMPTS, where, "--template 'TEXT with {fields}'") + "}"
        reference = reference or _first(fields, REFERENCES, where, "--reference FIELD")
        names = [*re.findall(r"\{(\w+)\}", text), reference]
        if missing := [name for name in names if name not in fields]:
            asking = "--reference" if missing[0] == reference else "--template"
            raise InputError(f"{where}: no field {missing[0]!r}, which {asking} names (fields: {', '.join(fields)})")
        prompt = re.sub(r"\{(\w+)\}", lambda place, fields=fields: str(fields[place[1]]), text)  # type: ignore[misc]
        inputs = {name: fields[name] for name in INPUTS if name in fields}
        rows.append(Row({"prompt": prompt, **inputs}, str(fields[reference])))
    return rows


def _first(fields: dict[str, Any], names: Sequence[str], where: str, option: str) -> str:
    for name in names:
        if name in fields:
            return name
    raise InputError(
        f"{where}: none of the fields {', '.join(names)}; name one with {option} (fields: {', '.join(fields)})"
    )


class Progress:
    """What was decoded so far, a line a row and run in a file, so that an interrupted comparison can go on.

    Args:
        path: the file.
        identity: what the lines depend on besides their rows; a file of another identity is refused.
        rows: the rows; a file may have fewer or more of them.
        resume: go on with what is there; otherwise there must be nothing.

    Attributes:
        done: by run and row, what was noted.

    Raises:
        InputError: there is something and ``resume`` is not set, or it is of another comparison.
    """

    def __init__(self, path: Path, identity: dict[str, Any], rows: Sequence[Row], *, resume: bool) -> None:
        self.done: dict[tuple[str, int], dict[str, Any]] = {}
        self._prompts = [_digest(row.prompt) for row in rows]
        digest = _digest(identity)
        if path.exists() and not resume:
            raise InputError(f"{path} is already there: give --resume to go on with it, or name another --out")
        if path.exists():
            self._read(path, digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if self.done else "w", encoding="utf-8")
        if not self.done:
            self._write({"identity": digest})

    def note(self, run: str, row: int, fields: dict[str, Any]) -> None:
        """Keep what came of a row."""
        self.done[run, row] = fields
        self._write({"run": run, "row": row, "prompt": self._prompts[row], **fields})

    def _write(self, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps(fields, ensure_ascii=False) + "\n")
        self._file.flush()

    def _read(self, path: Path, digest: str) -> None:
        whole, _, cut = path.read_text(encoding="utf-8").rpartition("\n")
        if cut:  # the last line was being written
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        first, *lines = [json.loads(line) for line in whole.split("\n") if line] or [{"identity": digest}]
        known = [line for line in lines if line["row"] < len(self._prompts)]
        if first.get("identity") != digest or any(line["prompt"] != self._prompts[line["row"]] for line in known):
            raise InputError(
                f"{path} is of another comparison (other recipes, data or model); leave --resume out, or name another --out"
            )
        for line in known:
            del line["prompt"]
            self.done[line.pop("run"), line.pop("row")] = line


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
