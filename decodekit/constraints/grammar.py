"""Grammar: texts of a context-free language, given in Lark or GBNF, or by the name of one that comes with decodekit."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from decodekit.core.errors import InputError, nearest
from decodekit.core.options import RecipePath
from decodekit.core.protocols import Constraint
from decodekit.core.vocabulary import Vocabulary
from decodekit.llg.engine import MAX_GRAMMAR, CompiledGrammar
from decodekit.llg.gbnf import to_lark


class Grammar(Constraint):
    """A context-free grammar: Lark as llguidance reads it, or GBNF as llama.cpp has it.

    llguidance cuts its text into terminals greedily, so that a Lark grammar means what it means there; a GBNF grammar is
    rewritten so that its language stays what it is. Cost: milliseconds once, and 10-300 us a token; more for a GBNF grammar
    whose terminals overlap.
    """

    cost: ClassVar[str] = "one mask a token"

    kind: Literal["grammar"] = "grammar"
    name: str | None = Field(None, description="a grammar that comes with decodekit, such as sql_select")
    lark: str | None = Field(None, description="a grammar in llguidance's Lark, with the rule start")
    gbnf: str | None = Field(None, description="a grammar in llama.cpp's GBNF, with the rule root")
    file: RecipePath | None = Field(None, description="the file of a grammar, .lark or .gbnf, relative to the recipe")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("name", "lark", "gbnf", "file") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a grammar has one source: give name, lark, gbnf or file (got {', '.join(given) or 'none'})"
            )
        if self.name is not None and self.name not in shipped():
            raise ValueError(f"no grammar is named {self.name!r}: {nearest(self.name, shipped())}")
        return self

    def compile(self, vocabulary: Vocabulary) -> CompiledGrammar:
        return CompiledGrammar(self.text(), vocabulary)

    def text(self) -> str:
        """The grammar in Lark.

        Raises:
            InputError: it cannot be read, or has an error.
        """
        if self.name is not None:
            return shipped()[self.name].read_text(encoding="utf-8")
        if self.lark is not None:
            return self.lark
        if self.gbnf is not None:
            return to_lark(self.gbnf)
        assert self.file is not None
        return _read(self.file)


def _read(path: Path) -> str:
    if path.suffix not in (".lark", ".gbnf"):
        raise InputError(f"the grammar {str(path)!r} is neither .lark nor .gbnf")
    try:
        if (size := path.stat().st_size) > MAX_GRAMMAR:
            raise InputError(f"the grammar {str(path)!r} has {size} bytes; at most {MAX_GRAMMAR} are read")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"the grammar {str(path)!r} cannot be read: {error}") from error
    return to_lark(text) if path.suffix == ".gbnf" else text


@cache
def shipped() -> dict[str, Traversable]:
    """The grammars that come with decodekit, by name."""
    package = files("decodekit")
    installed = package.joinpath("_grammars")
    # A wheel holds them in the package; in a checkout they lie beside it.
    folder = installed if installed.is_dir() else Path(str(package)).parent / "grammars"
    return {path.name.removesuffix(".lark"): path for path in folder.iterdir() if path.name.endswith(".lark")}
