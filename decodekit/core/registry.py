"""Plugins by name, over entry points: built-ins come through the same door as third parties.

Nothing is imported until it is named. ``DECODEKIT_PLUGINS`` (comma-separated distributions) limits what may load.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from decodekit.core import options, protocols
from decodekit.core.errors import PluginError, RecipeError, dotted, nearest

PREFIX = "decodekit.v1."
GROUPS: dict[str, tuple[type[protocols.Plugin], ...]] = {
    "rules": (protocols.Rule,),
    "strategies": (protocols.TokenStrategy, protocols.SearchStrategy, protocols.SequenceStrategy),
    "constraints": (protocols.Constraint,),
    "drafters": (protocols.Drafter,),
    "scorers": (protocols.Scorer,),
    "utilities": (protocols.Utility,),
}
OWN_DISTRIBUTION = "decodekit"


@dataclass(frozen=True)
class PluginInfo:
    """One row of ``decodekit plugins``; ``status`` is ``ok``, ``error``, ``ambiguous`` or ``not allowed``."""

    group: str
    kind: str
    distribution: str
    version: str
    module: str
    status: str
    error: str | None = None
    needs: tuple[str, ...] = ()
    cost: str = ""


def distribution_of(entry: EntryPoint) -> str:
    """The distribution that an entry point belongs to."""
    return _name(entry.dist) if entry.dist is not None else "unknown"


@cache
def _name(distribution: Distribution) -> str:
    """Its metadata are parsed each time that they are asked for."""
    return distribution.name


def _allowed(distribution: str) -> bool:
    listed = os.environ.get("DECODEKIT_PLUGINS")
    names = {_normalized(name.strip()) for name in (listed or "").split(",")}
    return listed is None or distribution == OWN_DISTRIBUTION or _normalized(distribution) in names


def _normalized(distribution: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@cache
def _entries(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=PREFIX + group):
        # An editable install can list a distribution twice on sys.path: the first wins, as for imports.
        found.setdefault(entry.name, {}).setdefault(distribution_of(entry), entry)
    return {kind: tuple(entries.values()) for kind, entries in sorted(found.items())}


def kinds(group: str) -> list[str]:
    """The names that ``group`` ("rules", "strategies", ...) knows, nothing imported."""
    if group not in GROUPS:
        raise PluginError(f"unknown plugin group {group!r}: {nearest(group, GROUPS)}")
    return list(_entries(group))


def find(group: str, kind: str) -> EntryPoint:
    """The entry point that ``kind`` or ``distribution:kind`` names.

    Raises:
        PluginError: unknown, not allowed, or claimed by two distributions (both are named).
    """
    distribution, _, name = kind.rpartition(":")
    known = kinds(group)
    singular = {"strategies": "strategy", "utilities": "utility"}.get(group, group[:-1])
    entries = _entries(group).get(name, ())
    if distribution:
        entries = tuple(entry for entry in entries if distribution_of(entry) == distribution)
    if not entries:
        raise PluginError(f"unknown {singular} {kind!r}: {nearest(name, known)}")
    allowed = [entry for entry in entries if _allowed(distribution_of(entry))]
    if not allowed:
        raise PluginError(
            f"{singular} {kind!r} of {distribution_of(entries[0])} may not load: DECODEKIT_PLUGINS allows only "
            f"{os.environ.get('DECODEKIT_PLUGINS')!r}"
        )
    if len(allowed) > 1:
        owners = sorted(distribution_of(entry) for entry in allowed)
        choices = " or ".join(repr(f"{owner}:{name}") for owner in owners)
        raise PluginError(f"{singular} {name!r} is in {' and in '.join(owners)}; choose {choices}")
    return allowed[0]


def load(group: str, kind: str) -> type[protocols.Plugin]:
    """Import the plugin class that ``kind`` names.

    Raises:
        PluginError: it cannot be found, fails to import, or is not a plugin of this group.
    """
    entry = find(group, kind)
    try:
        plugin = entry.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{group} {kind!r} of {distribution_of(entry)} ({entry.value}) failed to import: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(plugin, type) and issubclass(plugin, GROUPS[group])):
        expected = " or ".join(base.__name__ for base in GROUPS[group])
        raise PluginError(f"{group} {kind!r} of {distribution_of(entry)} ({entry.value}) is not a {expected}")
    return plugin


def create(group: str, spec: Mapping[str, Any] | str) -> protocols.Plugin:
    """Build a plugin from ``{"kind": ..., option: value, ...}`` or from its bare name; plugins inside it likewise.

    Raises:
        PluginError: the kind cannot be loaded.
        RecipeError: an option is unknown or has a wrong value.
    """
    spec = {"kind": spec} if isinstance(spec, str) else spec
    kind = spec.get("kind")
    if not isinstance(kind, str):
        raise RecipeError(f"'kind' is missing: give one of {', '.join(kinds(group))}", path=group)
    load(group, kind)
    try:
        return build(group, spec)
    except ValidationError as error:
        first = options.faults(error, spec)[0]
        raise RecipeError(first.message, path=dotted((kind, *first.loc))) from error


def build(group: str, spec: Any, expected: type[protocols.Plugin] | None = None) -> protocols.Plugin:
    """As ``create``, for validators: every fault is a ``ValidationError`` whose places lead into ``spec``.

    Args:
        group: "rules", "strategies", ...
        spec: a mapping with ``kind``, a bare kind, or a plugin, which is returned as it is.
        expected: which of the group's classes it must be.
    """
    bases = GROUPS[group] if expected is None else (expected,)
    wanted = " or ".join(base.__name__ for base in bases)
    if isinstance(spec, bases):
        return spec
    if isinstance(spec, protocols.Plugin):
        raise options.fault(f"{spec.kind!r} is not a {wanted}", "kind", code=options.MISFIT)
    spec = {"kind": spec} if isinstance(spec, str) else spec
    if not isinstance(spec, Mapping):
        raise options.fault(
            f"should be a kind or a mapping with 'kind', got {options.shown(spec)} (known: {', '.join(kinds(group))})"
        )
    if not isinstance(kind := spec.get("kind"), str):
        place = ("kind",) if "kind" in spec else ()
        raise options.fault(f"'kind' should name one of {', '.join(kinds(group))}", *place)
    try:
        plugin = load(group, kind)
    except PluginError as error:
        raise options.fault(str(error), "kind") from error
    if not issubclass(plugin, bases):
        found = next((base.__name__ for base in GROUPS[group] if issubclass(plugin, base)), plugin.__name__)
        raise options.fault(f"{kind!r} is a {found}, not a {wanted}", "kind", code=options.MISFIT)
    return options.validate(plugin, {**spec, "kind": kind.rpartition(":")[2]})


def name_of(plugin: protocols.Plugin) -> str:
    """What a recipe calls this plugin: its kind, or ``distribution:kind`` where several distributions have it."""
    for group, bases in GROUPS.items():
        entries = _entries(group).get(plugin.kind, ()) if isinstance(plugin, bases) else ()
        if len(entries) > 1:
            for entry in entries:
                # Only what is imported already can be this plugin's: nothing new is loaded to find out.
                if entry.module in sys.modules and entry.load() is type(plugin):
                    return f"{distribution_of(entry)}:{plugin.kind}"
    return plugin.kind


def origin(plugin: protocols.Plugin) -> tuple[str, str]:
    """The distribution that has this plugin, and its version."""
    for group, bases in GROUPS.items():
        for entry in _entries(group).get(plugin.kind, ()) if isinstance(plugin, bases) else ():
            if entry.value.partition(":")[0] == type(plugin).__module__ and entry.dist is not None:
                return entry.dist.name, entry.dist.version
    raise PluginError(
        f"{plugin.kind!r} ({type(plugin).__module__}) is not installed as a plugin; give it an entry point"
    )


def inventory() -> list[PluginInfo]:
    """Every plugin of every group, all imported; one that fails is a row with its error."""
    rows = []
    for group in GROUPS:
        for kind, entries in _entries(group).items():
            for entry in entries:
                rows.append(_inspect(group, kind, entry, ambiguous=len(entries) > 1))
    return rows


def _inspect(group: str, kind: str, entry: EntryPoint, *, ambiguous: bool) -> PluginInfo:
    distribution = distribution_of(entry)
    version = entry.dist.version if entry.dist is not None else "unknown"
    info = PluginInfo(group, kind, distribution, version, entry.value, "ok")
    if not _allowed(distribution):
        return replace(info, status="not allowed", error="left out by DECODEKIT_PLUGINS")
    try:
        plugin = load(group, f"{distribution}:{kind}")
    except PluginError as error:
        return replace(info, status="error", error=str(error))
    needs = tuple(sorted(str(need) for need in plugin.needs))
    status = "ambiguous" if ambiguous else "ok"
    return replace(info, status=status, needs=needs, cost=plugin.cost)
