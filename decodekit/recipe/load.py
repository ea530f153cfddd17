"""From recipe files, mappings, overrides and ``--set`` to one validated recipe."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from decodekit.core import options, registry
from decodekit.core.errors import PluginError, RecipeError, dotted
from decodekit.core.protocols import Plugin
from decodekit.recipe.combinations import check_combinations
from decodekit.recipe.languages import language_faults
from decodekit.recipe.merge import assign, merge, with_kinds
from decodekit.recipe.schema import Recipe, plain
from decodekit.recipe.source import MAX_BYTES, Key, Node, Origin, Source, from_python, parse

MAX_FILES = 32
GENERATION_CONFIG = "generation_config.json"
"""A model's own options, in which a recipe travels under the key ``decodekit``."""
_SUFFIXES = (".yaml", ".yml", ".json")

_SECTIONS = {"strategy": "strategies", "rules": "rules", "constraint": "constraints", "drafter": "drafters"}

RecipeSource = str | os.PathLike[str] | Mapping[str, Any] | Recipe


def load_recipe(
    source: RecipeSource, *, overrides: Mapping[str, Any] | None = None, set_values: Sequence[str] = ()
) -> Recipe:
    """Read, merge and validate a recipe.

    Args:
        source: a YAML file, a JSON file (``.json``), a model's ``generation_config.json`` that holds one, the same as a
            mapping, or a recipe to be changed.
        overrides: sections merged over it, as over a recipe that is extended.
        set_values: ``a.b=c`` each, merged last; the value is YAML, and a number in the path is a place in a list.

    Raises:
        RecipeError: the first fault in the order of reading: where it is, what is wrong, what would be right.
    """
    recipe, faults, _ = _read(source, overrides, set_values)
    if recipe is None:
        raise faults[0]
    return recipe


def recipe_faults(
    source: RecipeSource, *, overrides: Mapping[str, Any] | None = None, set_values: Sequence[str] = ()
) -> list[RecipeError]:
    """Every fault that shows without a model, in the order of reading; empty for a good recipe.

    A text that is not well formed has one fault; impossible combinations, and a constraint that is no language, show once
    there are no other faults.
    """
    try:
        recipe, faults, root = _read(source, overrides, set_values)
        if recipe is None or recipe.constraint is None:
            return faults
        return _located(root, language_faults(recipe.constraint, ("constraint",)))
    except RecipeError as error:
        return [error]


def _read(
    source: RecipeSource, overrides: Mapping[str, Any] | None, set_values: Sequence[str]
) -> tuple[Recipe | None, list[RecipeError], Node]:
    reader = _Reader()
    root = reader.root(source)
    if overrides:
        root = merge(root, reader.mapping(overrides, "overrides"))
    for text in set_values:
        root = assign(root, *reader.assignment(text))
    try:
        recipe = options.validate(Recipe, data := root.plain())
    except ValidationError as error:
        found = [_told_where(fault, data) for fault in options.faults(error, data)]
        return None, _located(root, found), root
    clashes = [options.Fault(clash.path, options.MISSING, clash.message) for clash in check_combinations(recipe)]
    return (None, _located(root, clashes), root) if clashes else (recipe, [], root)


class _Reader:
    """Reads every text of one recipe, and gives each its rank."""

    def __init__(self) -> None:
        self._rank = self._files = 0

    def root(self, source: RecipeSource) -> Node:
        if isinstance(source, Recipe):
            return self.mapping({name: _unbuilt(getattr(source, name)) for name in source.model_fields_set}, "recipe")
        if isinstance(source, Mapping):
            return self.mapping(source, "recipe")
        if not isinstance(source, str | os.PathLike):
            raise RecipeError(f"should be a recipe file, a mapping or a Recipe, got {options.shown(source)}")
        if len(lines := os.fspath(source).splitlines()) > 1:
            raise RecipeError(
                f"should be the path of a recipe file, got a text of {len(lines)} lines; give it as a mapping"
            )
        return self._file(Path(source), None, ())

    def mapping(self, data: Mapping[str, Any], label: str) -> Node:
        return self._extended(from_python(data, self._source(label, Path.cwd(), located=False)), ())

    def assignment(self, text: str) -> tuple[list[Key], Node]:
        """The path and value of one ``--set``."""
        source = self._source(f"--set {' '.join(text.split())}", Path.cwd(), located=False)
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
        if self._files > MAX_FILES:
            raise RecipeError(f"more than {MAX_FILES} files make up this recipe", path="extends", origin=str(named_by))
        try:
            if not path.is_file():
                raise FileNotFoundError
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            whole = Path(os.path.realpath(path))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            message = _absent(path) if isinstance(error, FileNotFoundError) else f"cannot be read: {reason}"
            if named_by is None:
                raise RecipeError(message, origin=label) from None
            raise RecipeError(f"{label}: {message}", path="extends", origin=str(named_by)) from None
        if whole in chain:
            names = " -> ".join(_label(link) for link in (*chain[chain.index(whole) :], whole))
            raise RecipeError(f"a recipe cannot extend itself: {names}", path="extends", origin=str(named_by))
        source = self._source(label, path.absolute().parent)
        node = parse(data, source, is_json=path.suffix.lower() == ".json")
        if path.name == GENERATION_CONFIG and isinstance(node.value, dict):
            if (carried := node.value.get("decodekit")) is None:
                message = "holds no recipe; one travels in it as generation_config.decodekit = decoder.recipe.to_dict()"
                raise RecipeError(message, origin=label)
            node = carried.node
        return self._extended(node, (*chain, whole))

    def _extended(self, node: Node, chain: tuple[Path, ...]) -> Node:
        """A recipe over those that it extends."""
        if not isinstance(node.value, dict):
            message = f"a recipe is a mapping such as 'strategy: {{kind: sample}}', got {options.shown(node.plain())}"
            raise RecipeError(message, origin=str(node.origin))
        own = with_kinds(Node({key: entry for key, entry in node.value.items() if key != "extends"}, node.origin))
        if "extends" not in node.value or (named := node.value["extends"].node).value is None:
            return own
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
    for section, group in _SECTIONS.items():
        if str(path) in registry.kinds(group):
            own = f"[{path}]" if section == "rules" else path
            return f"no such file{where}; {str(path)!r} is the name of a plugin: write '{section}: {own}' into a recipe file"
    if not path.parent.is_dir():
        return f"no such file: its folder does not exist{where}"
    listed = path.parent.iterdir() if os.access(path.parent, os.R_OK) else ()
    names = sorted(file.name for file in listed if file.suffix in _SUFFIXES)
    stems = difflib.get_close_matches(path.stem, {Path(name).stem for name in names}, n=2, cutoff=0.6)
    close = [name for stem in stems for name in names if Path(name).stem == stem]
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"no such file{where}{hint}"


def _told_where(fault: options.Fault, data: Mapping[str, Any]) -> options.Fault:
    """An unknown name beside the sections that is one of their plugins, or an option of one given there: where it belongs."""
    if fault.code != options.UNKNOWN or len(fault.loc) != 1 or not isinstance(name := fault.loc[0], str):
        return fault
    for section, group in _SECTIONS.items():
        given = data.get(section)
        for kind, known in map(partial(_options_of, group), given if isinstance(given, list) else [given]):
            if name in known:
                instead = f"{{kind: {kind}, {name}: ...}}"
                break
        else:
            if name not in registry.kinds(group):
                continue
            instead = f"{{kind: {name}, ...}}"
        own = f"[{instead}]" if section == "rules" else instead
        return fault._replace(message=f"no option here: write {section}: {own} instead")
    return fault


def _options_of(group: str, spec: Any) -> tuple[Any, Collection[str]]:
    """The kind of a plugin, and the options that it has."""
    kind = spec.get("kind") if isinstance(spec, Mapping) else None
    try:
        return kind, options.names(registry.load(group, kind)) if isinstance(kind, str) else ()
    except PluginError:
        return kind, ()


def _located(root: Node, faults: Sequence[options.Fault]) -> list[RecipeError]:
    """Faults as errors at the key or value they are about, in the order of reading."""
    placed = [(_origin(root, fault), fault) for fault in faults]
    placed.sort(key=lambda pair: pair[0].order)
    return [RecipeError(fault.message, path=dotted(fault.loc), origin=str(origin)) for origin, fault in placed]


def _origin(root: Node, fault: options.Fault) -> Origin:
    """Where the key of an unknown option was written, the section of a missing one, otherwise the value."""
    node, origin = root, root.origin
    for step in fault.loc:
        if isinstance(node.value, list) and isinstance(step, int):
            node = node.value[step]
        elif isinstance(node.value, dict) and step in node.value:
            key_origin, node = node.value[step]
            if fault.code == options.UNKNOWN:
                origin = key_origin
                continue
        else:
            break
        origin = node.origin
    return origin
