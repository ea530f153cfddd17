"""JSONL files of a data-set run: input lines that may be wrong, and an output that a kill never leaves half written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from decodekit.core.errors import InputError


class Line(NamedTuple):
    """A line of the input.

    Attributes:
        number: counted from 1.
        row: the object; ``None`` where it is none.
        error: what is wrong with it, with file and number.
    """

    number: int
    row: dict[str, Any] | None
    error: str | None = None

    @property
    def id(self) -> Any:
        """What the row is called: its ``id``, or the number of its line."""
        return self.row.get("id", self.number) if self.row is not None else self.number


def read_lines(source: Iterable[bytes], name: str) -> Iterator[Line]:
    """Each line that is not blank, malformed ones too; of rows with one id, all but the first are refused.

    Args:
        source: the lines, as bytes: one that is no UTF-8 must not stop the others.
        name: of the file, for errors.
    """
    seen: dict[str, int] = {}
    for number, text in enumerate(source, start=1):
        if not text.strip():
            continue
        line = _parse(text, number, name)
        if line.error is None:
            key = key_of(line.id)
            if key in seen:
                line = Line(
                    number, None, f"{name}:{number}: the id {line.id!r} is that of line {seen[key]}; ids differ"
                )
            seen.setdefault(key, number)
        yield line


def _parse(text: bytes, number: int, name: str) -> Line:
    try:
        row = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return Line(number, None, f"{name}:{number}: expected a JSON object: {error}")
    if not isinstance(row, dict):
        return Line(number, None, f"{name}:{number}: expected a JSON object, got {type(row).__name__}")
    if not isinstance(row.get("id", ""), str | int):
        return Line(number, None, f"{name}:{number}: an id is a string or a whole number, got {row['id']!r}"[:300])
    return Line(number, row)


def key_of(identity: Any) -> str:
    """An id, told apart from others: the string ``"1"`` is not the number 1."""
    return json.dumps(identity)


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The finished rows of an output by the key of their id; the torn line of a killed run, if any, is cut off.

    Raises:
        InputError: the file is not the output of such a run.
    """
    done: dict[str, dict[str, Any]] = {}
    if not path.is_file():
        return done
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    for number, text in enumerate(content[:whole].splitlines(), start=1):
        try:
            row = json.loads(text)
            done[key_of(row["id"])] = row
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}:{number}: no row of an earlier run ({type(error).__name__}); give another output file"
            ) from error
    if whole < len(content):
        os.truncate(path, whole)
    return done


class Appender:
    """Appends rows to a file, each whole: what a kill or a full disk tears is cut off again.

    Args:
        target: the file, or an open stream (standard output) that is only written.
    """

    def __init__(self, target: Path | IO[bytes]) -> None:
        self._name = str(target) if isinstance(target, Path) else "standard output"
        self._stream = None if isinstance(target, Path) else target
        try:
            self._file = (
                os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if isinstance(target, Path) else -1
            )
        except OSError as error:
            raise InputError(f"{self._name} cannot be written: {error.strerror}") from error

    def append(self, row: dict[str, Any]) -> None:
        """Write a row and its line end.

        Raises:
            InputError: it cannot be written; what was there before is whole.
        """
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        try:
            if self._stream is not None:
                self._stream.write(line)
                self._stream.flush()
                return
            end = os.fstat(self._file).st_size
            written = os.write(self._file, line)
            if written < len(line):
                os.ftruncate(self._file, end)
                raise OSError(28, "no space is left")
        except OSError as error:
            raise InputError(f"{self._name} cannot be written: {error.strerror}; --resume goes on from here") from error

    def close(self) -> None:
        """No more rows."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def rewrite(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Put these rows in place of a file, all or nothing."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
    partial.replace(path)
