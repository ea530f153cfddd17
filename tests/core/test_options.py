from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from decodekit.core.errors import PluginError
from decodekit.core.options import MISSING, UNKNOWN, WRONG, RecipePath, Written, faults, shown, validate


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: float = 0
    count: int = 0
    flag: bool = False
    ids: tuple[int, ...] = ()
    weights: dict[str, float] = Field(default_factory=dict)
    either: int | str = 0
    file: RecipePath | None = None
    size: int = 0
    renamed_: float = Field(0, alias="renamed")

    @field_validator("size", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        if value == "broken":
            raise PluginError("cannot be read")
        return int(value.removesuffix("KiB")) * 1024 if isinstance(value, str) else value


def found(**options: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(ValidationError) as caught:
        validate(Model, options)
    return [(".".join(map(str, fault.loc)), fault.code, fault.message) for fault in faults(caught.value, options)]


def test_plain_values() -> None:
    model = validate(Model, {"number": 1, "ids": [1, 2], "either": "5", "size": "4KiB", "weights": {"a": 1}})
    assert (model.number, model.ids, model.either, model.size) == (1.0, (1, 2), "5", 4096)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"number": "0.5"}, ("number", WRONG, "should be a number, got the text '0.5'; leave the quotes out")),
        ({"number": "nan"}, ("number", WRONG, "should be a number, got the text 'nan'")),
        ({"number": True}, ("number", WRONG, "should be a number, got true")),
        ({"number": "x"}, ("number", WRONG, "should be a valid number, got 'x'")),
        ({"count": 1.5}, ("count", WRONG, "should be a valid integer, got a number with a fractional part, got 1.5")),
        ({"flag": 1}, ("flag", WRONG, "should be true or false, got 1")),
        ({"flag": "yes"}, ("flag", WRONG, "should be true or false, got 'yes'")),
        ({"ids": [1, "2"]}, ("ids.1", WRONG, "should be a number, got the text '2'; leave the quotes out")),
        ({"ids": 3}, ("ids", WRONG, "should be a list, got 3")),
        ({"weights": {"a": "1"}}, ("weights.a", WRONG, "should be a number, got the text '1'; leave the quotes out")),
        ({"weights": []}, ("weights", WRONG, "should be a mapping, got []")),
        ({"renamed": "1"}, ("renamed", WRONG, "should be a number, got the text '1'; leave the quotes out")),
        ({"renamd": 1}, ("renamd", UNKNOWN, "unknown option: did you mean 'renamed'?")),
        ({"size": "broken"}, ("", WRONG, "cannot be read")),
    ],
)
def test_one_fault(options: dict[str, Any], fault: tuple[str, str, str]) -> None:
    ((path, code, message),) = found(**options)
    assert (path, code) == fault[:2]
    assert message.startswith(fault[2])


def test_a_misspelt_option_is_not_missing_as_well() -> None:
    class Needs(BaseModel):
        model_config = ConfigDict(extra="forbid")
        needed: int

    for options, code in (({}, MISSING), ({"neded": 1}, UNKNOWN)):
        with pytest.raises(ValidationError) as caught:
            validate(Needs, options)
        assert [fault.code for fault in faults(caught.value, options)] == [code]


def test_braces_in_messages() -> None:
    assert found(number="{x}")[0][2] == "should be a valid number, got '{x}'"


def test_shown() -> None:
    assert [shown(value) for value in (True, None, 1.5, "a'b", [1])] == ["true", "null", "1.5", '"a\'b"', "[1]"]
    assert len(shown("x" * 1000)) < 70


class TestPaths:
    def test_beside_the_file_that_wrote_it(self) -> None:
        assert validate(Model, {"file": Written("../x", Path("/a/b"))}).file == Path("/a/x")
        assert validate(Model, {"file": Written("/y", Path("/a/b"))}).file == Path("/y")
        assert validate(Model, {"file": "x"}).file == Path("x")

    def test_written_text_is_text(self) -> None:
        written = Written("x", Path("/a"))
        for copied in (copy.deepcopy(written), pickle.loads(pickle.dumps(written))):
            assert copied == "x"
            assert copied.directory == Path("/a")
        assert type(validate(Model, {"either": written}).either) is str
