"""From plain data to validated options, with faults a reader can act on.

pydantic is lax where a recipe must not be (it reads the text ``"0.7"`` as a number) and speaks of inputs where a reader
wrote an option; both are put right here, for plugins and every other section of a recipe.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from decodekit.core.errors import DecodekitError, nearest

UNKNOWN, MISSING, WRONG, MISFIT = "unknown_option", "missing_option", "wrong_option", "wrong_kind"
_SHOWN = 60
_MOST_FAULTS = 100
_WORDING = tuple(
    (re.compile(theirs), ours)
    for theirs, ours in (
        ("^(Input|List|Tuple|Dictionary|String) should ", "should "),
        (r" after validation, not \d+", ""),
        (", unable to parse string as an? .*", ""),
        ("a valid (tuple|list)", "a list"),
        (r"a valid dictionary( or instance of \w+)?", "a mapping"),
    )
)

Model = TypeVar("Model", bound=BaseModel)
Loc = tuple[int | str, ...]


class Fault(NamedTuple):
    """One fault: where pydantic found it, its sort (``UNKNOWN``, ``MISSING``, ...), and one line about it."""

    loc: Loc
    code: str
    message: str


class Written(str):
    """Text from a recipe that remembers the directory of the file that wrote it."""

    directory: Path

    def __new__(cls, text: str, directory: Path) -> Self:  # noqa: D102
        written = super().__new__(cls, text)
        written.directory = directory
        return written

    def __reduce__(self) -> tuple[type[Self], tuple[str, Path]]:
        return type(self), (str(self), self.directory)


def _beside_its_file(value: Any) -> Any:
    if not isinstance(value, Written):
        return value
    return Path(os.path.normpath(value.directory / value))


RecipePath = Annotated[Path, BeforeValidator(_beside_its_file)]
"""The type of an option that names a file: absolute, and relative paths start at the recipe file that wrote them."""

PythonFunction = Annotated[Callable[..., Any], WithJsonSchema({"not": {}})]
"""The type of an option that is given from Python alone: a recipe file is data and names no code."""


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"should be a regular expression, got {shown(pattern)}: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
"""The type of an option that is a regular expression in Python's syntax."""


def _model_beside_its_file(value: Any) -> Any:
    if isinstance(value, Written) and (value.startswith(("./", "../")) or (value.directory / value).is_dir()):
        return os.path.normpath(value.directory / value)
    return value


ModelName = Annotated[str, BeforeValidator(_model_beside_its_file)]
"""The type of an option that names a model: an id, or a folder, which where it is relative starts at its recipe file."""


def shown(value: Any) -> str:
    """A value as a recipe writes it, cut to fit in a line."""
    words = {True: "true", False: "false", None: "null"}
    text = (
        words[value]
        if value is None or isinstance(value, bool)
        else repr(value[:_SHOWN] if isinstance(value, str) else value)
    )
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def names(model: type[BaseModel]) -> dict[str, str]:
    """The options of a model as they are written, each with its attribute; they differ for an alias."""
    return {field.alias or attribute: attribute for attribute, field in model.model_fields.items()}


def fault(message: str, *loc: int | str, code: str = WRONG) -> ValidationError:
    """A fault of our own for a validator to raise, so that the models around it put their places before ``loc``."""
    return _validation_error([Fault(loc, code, message)])


def faults(error: ValidationError, given: Any) -> list[Fault]:
    """What an error of ``validate`` says about ``given``: one fault a place, in pydantic's order.

    Places lead through ``given`` alone, without the steps that pydantic makes up for the branches of a union. Of these
    branches, the one that fits best goes deepest, and what the others say of the whole is left out.
    """
    found = [
        Fault(_place(detail["loc"], detail["type"], given), detail["type"], detail["msg"])
        for detail in error.errors(include_url=False)
    ]
    telling = {one.loc for one in found if one.code != MISFIT}
    inside = {loc[:length] for loc in telling for length in range(len(loc))}
    kept: dict[Loc, list[Fault]] = {}
    for one in found:
        section = one.loc[:-1] if one.code == MISFIT and one.loc[-1:] == ("kind",) else one.loc
        if section not in inside and not (one.code == MISFIT and section in telling):
            kept.setdefault(one.loc, []).append(one)
    return [same[0]._replace(message=_either([one.message for one in same])) for same in kept.values()]


def validate(model: type[Model], options: Mapping[str, Any]) -> Model:
    """``options`` as an instance of ``model``, no text taken for a number and no number for a truth value.

    Raises:
        ValidationError: with messages as ``faults`` gives them, the first 100 of many. A model may have ``elsewhere``,
            a class variable that maps names it does not know to what should be written instead.
    """
    try:
        value = model.model_validate(options)
    except ValidationError as error:
        found = [_fault(detail, model) for detail in error.errors(include_url=False)[:_MOST_FAULTS]]
        # An option is missing most often because its name is misspelt: the misspelling says all.
        misspelt = any(code == UNKNOWN and len(loc) == 1 for loc, code, _ in found)
        kept = [one for one in found if not (misspelt and one.code == MISSING and len(one.loc) == 1)]
        raise _validation_error(kept) from error
    except DecodekitError as error:
        raise fault(str(error)) from error
    except Exception as error:
        raise fault(f"{type(error).__name__} while its options were read: {error}") from error
    mistaken = [
        Fault(loc, WRONG, message)
        for name, attribute in names(model).items()
        if name in options
        for loc, message in _mistaken(options[name], getattr(value, attribute), (name,))
    ]
    if mistaken:
        raise _validation_error(mistaken)
    return value


def _place(loc: Loc, code: str, given: Any) -> Loc:
    place: list[int | str] = []
    for index, step in enumerate(loc):
        if isinstance(given, (list, tuple)):
            within = isinstance(step, int) and step < len(given)
        else:
            within = isinstance(given, Mapping) and step in given
        if within:
            given = given[step]
        elif code != MISSING or index + 1 < len(loc):
            continue
        place.append(step)
    return tuple(place)


def _either(messages: list[str]) -> str:
    """What the branches of a union said, as one line: their common beginning and end are said once."""
    words = [re.findall(r"[^\s,]+|\s+|,", message) for message in dict.fromkeys(messages)]
    start = _shared(words)
    end = _shared([line[start:][::-1] for line in words])
    middles = ["".join(line[start : len(line) - end]) for line in words]
    return "".join([*words[0][:start], " or ".join(middles), *words[0][len(words[0]) - end :]])


def _shared(lines: list[list[str]]) -> int:
    """How many words all lines begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*lines, strict=False)))


def _validation_error(found: Sequence[Fault]) -> ValidationError:
    details = []
    for loc, code, message in found:
        line = re.sub(r"\s*\n\s*", " ", message.strip())
        details.append(InitErrorDetails(type=PydanticCustomError(code, "{line}", {"line": line}), loc=loc, input=None))
    return ValidationError.from_exception_data("options", details)


def _fault(detail: ErrorDetails, model: type[BaseModel]) -> Fault:
    loc, code, message, given = detail["loc"], detail["type"], detail["msg"], detail["input"]
    if code in (UNKNOWN, MISSING, WRONG, MISFIT):
        return Fault(loc, code, message)
    if code == "extra_forbidden":
        return Fault(loc, UNKNOWN, _unknown(str(loc[-1]), model) if len(loc) == 1 else "unknown option")
    if code == "missing":
        return Fault(loc, MISSING, "missing: this option is required")
    if code == "value_error":
        return Fault(loc, WRONG, str(detail["ctx"]["error"]))
    if code in ("bool_type", "bool_parsing"):
        return Fault(loc, WRONG, f"should be true or false, got {shown(given)}")
    if code in ("int_type", "float_type") and isinstance(given, str) and _reads_as_number(given):
        return Fault(loc, WRONG, _quoted(given))
    for theirs, ours in _WORDING:
        message = theirs.sub(ours, message)
    return Fault(loc, WRONG, f"{message}, got {shown(given)}")


def _unknown(name: str, model: type[BaseModel]) -> str:
    elsewhere: Mapping[str, str] = getattr(model, "elsewhere", {})
    if name in elsewhere:
        return f"no option here: write {elsewhere[name]} instead"
    return f"unknown option: {nearest(name, names(model).keys() - {'kind'})}"


def _mistaken(written: Any, value: Any, loc: Loc) -> Iterator[tuple[Loc, str]]:
    """Places where pydantic took one type for another; what only a validator reads as a number (``4GiB``) is none."""
    if isinstance(written, (list, tuple)) and isinstance(value, (list, tuple)) and len(written) == len(value):
        for index, (one, other) in enumerate(zip(written, value, strict=True)):
            yield from _mistaken(one, other, (*loc, index))
    elif isinstance(written, Mapping) and isinstance(value, Mapping):
        for key in written.keys() & value.keys():
            yield from _mistaken(written[key], value[key], (*loc, key))
    elif isinstance(value, bool):
        if isinstance(written, (str, int, float)) and not isinstance(written, bool):
            yield loc, f"should be true or false, got {shown(written)}"
    elif isinstance(value, (int, float)):
        if isinstance(written, bool):
            yield loc, f"should be a number, got {shown(written)}"
        elif isinstance(written, str) and _reads_as_number(written):
            yield loc, _quoted(written)


def _quoted(text: str) -> str:
    hint = "; leave the quotes out" if math.isfinite(float(text)) else ""
    return f"should be a number, got the text {shown(text)}{hint}"


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
