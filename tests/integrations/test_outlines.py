import enum
from dataclasses import dataclass
from typing import Literal

import pytest
from pydantic import BaseModel

from decodekit.core.errors import InputError
from decodekit.integrations.outlines import constraint_of
from tests.llg.walks import accepts, byte_vocabulary

outlines = pytest.importorskip("outlines.types")
VOCABULARY = byte_vocabulary()


class Person(BaseModel):
    name: str
    age: int = 0


@dataclass
class Point:
    x: float
    y: float


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    ("output_type", "kind", "good", "bad"),
    [
        (outlines.Regex("[0-9]{2}"), "regex", "12", "1"),
        (outlines.JsonSchema({"type": "integer"}), "json_schema", "12", "1.5"),
        (outlines.CFG('start: "a" start "b" | "ab"'), "grammar", "aabb", "aab"),
        (outlines.Choice(["yes", "no"]), "regex", "no", "maybe"),
        (outlines.digit + outlines.exactly(2, outlines.either("a", "b")), "regex", "1ab", "1a"),
        (outlines.optional("x") + outlines.exactly(2, outlines.char), "regex", "xab", "xab日c"),
        (Person, "json_schema", '{"age": 3, "name": "x"}', '{"age": 3}'),
        (Point, "json_schema", '{"y": 1, "x": 2.5}', '{"x": 1}'),
        (Colour, "regex", "red", "green"),
        (Literal["a", "b.c"], "regex", "b.c", "bxc"),
        (list[Person], "json_schema", '[{"name": "x"}]', '[{"age": 1}]'),
        (int, "regex", "-12", "1.5"),
    ],
)
def test_an_output_type_is_a_constraint(output_type, kind, good, bad) -> None:
    constraint = constraint_of(output_type)
    compiled = constraint.compile(VOCABULARY)
    assert constraint.kind == kind
    assert accepts(compiled, VOCABULARY, good)
    assert not accepts(compiled, VOCABULARY, bad)


def test_what_outlines_does_not_know_is_refused() -> None:
    with pytest.raises(InputError, match="no output type"):
        constraint_of(object())
