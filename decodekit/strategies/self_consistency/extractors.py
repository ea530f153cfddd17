"""From a text to the answer in it, in one form for each answer; ``None`` where there is none, which is no vote."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from decimal import Context, Decimal, InvalidOperation
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import override

from decodekit.core.options import Pattern, PythonFunction

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
# A sign belongs to the number unless it stands between two of them (10-3).
_NUMBER = re.compile(rf"(?<![\w)])[-−+]?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?|{_DIGITS}(?:\.\d+)?", re.ASCII)


def canonical(answer: str) -> str | None:
    """An answer in the form that equal ones share: numbers as plain decimals (1,000 = 1000.0 = 1e3), white space made one."""
    text = " ".join(answer.split())
    return _canonical_number(text.removeprefix("$")) or text or None


def _canonical_number(text: str) -> str | None:
    if not _NUMBER.fullmatch(text):
        return None
    try:
        number = Decimal(text.replace(",", "").replace("−", "-"))
    except InvalidOperation:  # an exponent beyond all bounds
        return None
    number = number.normalize(Context(prec=len(text) + 1))
    if not number:
        return "0"
    return format(number, "f") if -20 < number.adjusted() < 20 else str(number)


class Extractor(BaseModel, ABC):
    """Finds the answer in a text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def find(self, text: str) -> str | None:
        """The answer as it stands in the text."""

    def __call__(self, text: str) -> str | None:
        """The answer in its canonical form; ``None`` where there is none."""
        found = self.find(text)
        return None if found is None else canonical(found)


class LastNumber(Extractor):
    """The last number of the text."""

    kind: Literal["last_number"] = "last_number"

    @override
    def find(self, text: str) -> str | None:
        numbers = _NUMBER.findall(text)
        return numbers[-1] if numbers else None


class Boxed(Extractor):
    r"""What stands in the last ``\boxed{...}``, braces inside it balanced."""

    kind: Literal["boxed"] = "boxed"

    @override
    def find(self, text: str) -> str | None:
        _, box, rest = text.rpartition(r"\boxed{")
        depth = 1
        for place, character in enumerate(rest if box else ""):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return rest[:place]
        return None


class Regex(Extractor):
    """The last match of a pattern: its first group, or all of it where it has none."""

    kind: Literal["regex"] = "regex"
    pattern: Pattern = Field(description="in Python's syntax")

    @override
    def find(self, text: str) -> str | None:
        matches = [*re.finditer(self.pattern, text)]
        return matches[-1][1 if matches[-1].re.groups else 0] if matches else None


class Choice(Extractor):
    """The letter of a choice: after the last "answer (is)", else the last in brackets, else one that begins a line alone."""

    kind: Literal["choice"] = "choice"
    letters: str = Field("ABCDE", pattern="^[A-Z]+$", description="the letters that can be chosen")

    @override
    def find(self, text: str) -> str | None:
        letter = f"([{self.letters}])"
        stated = rf"(?i:answer)(?:\s+(?i:is))?\s*:?\s*[*(]*{letter}\b"
        for pattern in (stated, rf"\({letter}\)", rf"(?m)^\W*{letter}(?:[.):]|\W*$)"):
            if found := re.findall(pattern, text):
                return str(found[-1])
        return None


class JsonPath(Extractor):
    """A value in the last JSON object or array of the text."""

    kind: Literal["json_path"] = "json_path"
    path: str = Field(min_length=1, description="names and places in lists, joined by dots, such as answer.values.0")

    @override
    def find(self, text: str) -> str | None:
        for document in reversed([*_documents(text)]):
            value: Any = document
            for step in self.path.split("."):
                if isinstance(value, dict) and step in value:
                    value = value[step]
                elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                    value = value[int(step)]
                else:
                    break
            else:
                return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        return None


def _documents(text: str) -> Iterator[Any]:
    decoder, place = json.JSONDecoder(), 0
    while (match := re.compile(r"[{\[]").search(text, place)) is not None:
        try:
            document, place = decoder.raw_decode(text, match.start())
        except ValueError:
            place = match.end()
        except RecursionError:  # a flood of brackets: what begins inside it is as deep
            place = len(text) - len(text[match.end() :].lstrip("{[ \t\r\n"))
        else:
            yield document


class Custom(Extractor):
    """A Python function of the text that gives the answer, or ``None``; given from Python."""

    kind: Literal["custom"] = "custom"
    function: PythonFunction

    @override
    def find(self, text: str) -> str | None:
        answer = self.function(text)
        return None if answer is None else str(answer)


_Any = Annotated[LastNumber | Boxed | Regex | Choice | JsonPath | Custom, Field(discriminator="kind")]


def _spelled_out(spec: Any) -> Any:
    if isinstance(spec, str):
        return {"kind": spec}
    if callable(spec) and not isinstance(spec, Extractor):
        return {"kind": "custom", "function": spec}
    return spec


AnyExtractor = Annotated[
    _Any, BeforeValidator(_spelled_out, json_schema_input_type=_Any | Literal["last_number", "boxed", "choice"])
]
"""An extractor as ``{kind: ..., ...}``, by its bare kind, or as a Python function."""
