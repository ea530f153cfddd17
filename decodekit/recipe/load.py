"""From recipe files, mappings, overrides and ``--set`` to one validated recipe."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from decodekit.core import options
from decodekit.core.errors import RecipeError
from decodekit.core.protocols import Plugin
from decodekit.recipe.combinations import check_combinations
from decodekit.recipe.merge import assign, merge, with_kinds
from decodekit.recipe.schema import Recipe, plain
from decodekit.recipe.source import MAX_BYTES, Key, Node, Origin, Source, from_python, parse

MAX_FILES = 32
_SUFFIXES = (".yaml", ".yml", ".json")

RecipeSource = str | os.PathLike[str] | Mapping[str, Any] | Recipe


def load_recipe(
    source: RecipeSource, *, overrides: Mapping[str, Any] | None = None, set_values: Sequence[str] = ()
) -> Recipe:
    """Read, merge and validate a recipe.

    Args:
        source: a YAML file, a JSON file (``.json``), the same as a mapping, or a recipe to be changed.
        overrides: sections merged over it, as over a recipe that is extended.
        set_values: ``a.b=c`` each, merged last; the value is YAML, and a number in the path is a place in a list.

    Raises:
        RecipeError: the first fault in the order of reading: where it is, what is wrong, what would be right.
    """
    recipe, faults = _read(source, overrides, set_values)
    if recipe is None:
        raise faults[0]
    return recipe


def recipe_faults(
    source: RecipeSource, *, overrides: Mapping[str, Any] | None = None, set_values: Sequence[str] = ()
) -> list[RecipeError]:
    """Every fault that ``load_recipe`` could raise, in the order of reading; empty for a good recipe.

    A text that is not well formed has one fault; impossible combinations show once there are no other faults.
    """
    try:
        return _read(source, overrides, set_values)[1]
    except RecipeError as error:
        return [error]


def _read(
    source: RecipeSource, overrides: Mapping[str, Any] | None, set_values: Sequence[str]
) -> tuple[Recipe | None, list[RecipeError]]:
    reader = _Reader()
    root = reader.root(source)
    if overrides:
        root = merge(root, reader.mapping(overrides, "overrides"))
    for text in set_values:
        root = assign(root, *reader.assignment(text))
    try:
        recipe = options.validate(Recipe, root.plain())
    except ValidationError as error:
        return None, _located(root, options.faults(error))
    clashes = [options.Fault(clash.path, options.MISSING, clash.message) for clash in check_combinations(recipe)]
    return (None, _located(root, clashes)) if clashes else (recipe, [])


class _Reader:
    """Reads every text of one recipe, and gives each its rank."""

    def __init__(self) -> None:
        self._rank = self._files = 0

    def root(self, source: RecipeSource) -> Node:
        if isinstance(source, Recipe):
            return self.mapping({name: _unbuilt(getattr(source, name)) for name in source.model_fields_set}, "recipe")
        if isinstance(source, Mapping):
            return self.mapping(source, "recipe")
        if len(lines := os.fspath(source).splitlines()) > 1:
            raise RecipeError(
                f"should be the path of a recipe file, got a text of {len(lines)} lines; give it as a mapping"
            )
        return self._file(Path(source), None, ())

    def mapping(self, data: Mapping[str, Any], label: str) -> Node:
        return self._extended(from_python(data, self._source(label, Path.cwd(), located=False)), ())

    def assignment(self, text: str) -> tuple[list[Key], Node]:
        """The path and value of one ``--set``."""
        source = self._source(f"--set {text}", Path.cwd(), located=False)
        path, equals, value = text.partition("=")
        steps = path.strip().split(".")
        if not equals or not all(steps):
            raise RecipeError("should be path=value, such as generation.seed=1", origin=source.label)
        if steps[0] == "extends":
            raise RecipeError("cannot be set: a file says what it extends", path="extends", origin=source.label)
        keys = [int(step) if step.isascii() and step.isdecimal() and len(step) < 10 else step for step in steps]
        return keys, parse(value, source) if value.strip() else Node(None, Origin(source))

    def _source(self, label: str, directory: Path, *, located: bool = True) -> Source:
        self._rank += 1
        return Source(label, directory, self._rank, located)

    def _file(self, path: Path, named_by: Origin | None, chain: tuple[Path, ...]) -> Node:
        label = str(path) if named_by is None else _label(path)
        self._files += 1
        if (whole := Path(os.path.realpath(path))) in chain:
            names = " -> ".join(_label(link) for link in (*chain[chain.index(whole) :], whole))
            raise RecipeError(f"a recipe cannot extend itself: {names}", path="extends", origin=str(named_by))
        if self._files > MAX_FILES:
            raise RecipeError(f"more than {MAX_FILES} files make up this recipe", path="extends", origin=str(named_by))
        try:
            if not path.is_file():
                raise FileNotFoundError
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            message = _absent(path) if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
            if named_by is None:
                raise RecipeError(message, origin=label) from None
            raise RecipeError(f"{label}: {message}", path="extends", origin=str(named_by)) from None
        source = self._source(label, path.absolute().parent)
        return self._extended(parse(data, source, is_json=path.suffix.lower() == ".json"), (*chain, whole))

    def _extended(self, node: Node, chain: tuple[Path, ...]) -> Node:
        """A recipe over those that it extends."""
        if not isinstance(node.value, dict):
            message = f"a recipe is a mapping such as 'strategy: {{kind: sample}}', got {options.shown(node.plain())}"
            raise RecipeError(message, origin=str(node.origin))
        own = with_kinds(Node({key: entry for key, entry in node.value.items() if key != "extends"}, node.origin))
        if "extends" not in node.value:
            return own
        named = node.value["extends"].node
        bases = named.value if isinstance(named.value, list) else [named]
        for base in bases:
            if not isinstance(base.value, str) or not base.value:
                message = f"should be a recipe file or a list of them, got {options.shown(base.plain())}"
                raise RecipeError(message, path="extends", origin=str(base.origin))
        directory = node.origin.source.directory
        files = [self._file(Path(os.path.normpath(directory / base.value)), base.origin, chain) for base in bases]
        return reduce(merge, [*files, own])


def _unbuilt(section: Any) -> Any:
    """Plugins stay as they are: one given from Python need not be installed."""
    return plain(section) if isinstance(section, BaseModel) and not isinstance(section, Plugin) else section


def _label(path: Path) -> str:
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _absent(path: Path) -> str:
    """Why a path is no recipe file, with the names it may have meant."""
    if path.exists():
        return "is a directory, not a recipe file" if path.is_dir() else "is not a regular file"
    where = "" if path.is_absolute() else f" (relative paths start at {Path.cwd()})"
    if not path.parent.is_dir():
        return f"no such file: its folder does not exist{where}"
    names = sorted(file.name for file in path.parent.iterdir() if file.suffix in _SUFFIXES)
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"no such file{where}{hint}"


def _located(root: Node, faults: Sequence[options.Fault]) -> list[RecipeError]:
    """Faults as errors at the key or value they are about, in the order of reading, one for each place."""
    placed = [(*_place(root, fault), fault) for fault in faults]
    found: dict[tuple[str, ...], tuple[Origin, list[str]]] = {}
    for path, origin, fault in placed:
        if fault.code == options.MISFIT:
            # Where several sorts of plugin fit, only the faults of the sort that was given say anything.
            section = path[:-1] if path[-1] == "kind" else path
            if any(other.code != options.MISFIT and there[: len(section)] == section for there, _, other in placed):
                continue
        messages = found.setdefault(path, (origin, []))[1]
        if fault.message not in messages:
            messages.append(fault.message)
    ordered = sorted(found.items(), key=lambda item: item[1][0].order)
    return [
        RecipeError(_either(messages), path=".".join(path), origin=str(origin)) for path, (origin, messages) in ordered
    ]


def _place(root: Node, fault: options.Fault) -> tuple[tuple[str, ...], Origin]:
    """The path of a fault in the recipe and where that was written: a key for an unknown option, otherwise a value."""
    node, origin, path = root, root.origin, []
    for step in fault.loc:
        if isinstance(node.value, dict) and step in node.value:
            key_origin, node = node.value[step]
            origin = key_origin if fault.code == options.UNKNOWN else node.origin
        elif isinstance(node.value, list) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            origin = node.origin
        elif fault.code != options.MISSING or step != fault.loc[-1]:
            continue  # a step of pydantic's own, such as the branch of a union
        path.append(str(step))
    return tuple(path), origin


def _either(messages: list[str]) -> str:
    """What the branches of a union said, as one line: their common beginning and end are said once."""
    words = [re.findall(r"[^\s,]+|\s+|,", message) for message in messages]
    start = _shared(words)
    end = _shared([line[start:][::-1] for line in words])
    middles = ["".join(line[start : len(line) - end]) for line in words]
    return "".join([*words[0][:start], " or ".join(middles), *words[0][len(words[0]) - end :]])


def _shared(lines: list[list[str]]) -> int:
    """How many words all lines begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*lines, strict=False)))
