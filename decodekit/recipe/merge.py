"""How recipes combine: ``extends``, overrides and ``--set`` follow the same rule."""

from __future__ import annotations

from typing import NoReturn

from decodekit.core.errors import RecipeError, dotted
from decodekit.core.options import shown
from decodekit.core.protocols import Plugin
from decodekit.recipe.schema import plain
from decodekit.recipe.source import Entry, Key, Node, from_python

_SECTIONS_BY_KIND = ("strategy", "constraint", "drafter", "cache")


def merge(base: Node, over: Node) -> Node:
    """``over`` laid over ``base``: mappings merge, everything else replaces.

    A mapping with another ``kind`` replaces too, so that no option of the old kind is left behind.
    """
    base = _spelled_out(base)
    if not isinstance(base.value, dict):
        return over
    if isinstance(over.value, str) and "kind" in base.value:
        over = _kind(over)
    if not isinstance(over.value, dict) or _kinds_differ(base.value, over.value):
        return over
    merged = dict(base.value)
    for key, (origin, node) in over.value.items():
        merged[key] = Entry(origin, merge(merged[key].node, node) if key in merged else node)
    return Node(merged, over.origin)


def assign(root: Node, path: list[Key], value: Node) -> Node:
    """``root`` with ``value`` laid over what stands at ``path``; mappings on the way are made, lists must be there.

    Raises:
        RecipeError: the path leads through a scalar or to no item of a list.
    """
    return with_kinds(_assign(root, path, 0, value))


def with_kinds(root: Node) -> Node:
    """A recipe with its bare kinds as mappings (``dola`` as ``{kind: dola}``), into which options can be merged."""
    sections = dict(root.value)
    for name in _SECTIONS_BY_KIND:
        if name in sections and isinstance(sections[name].node.value, str):
            sections[name] = Entry(sections[name].key_origin, _kind(sections[name].node))
    if "rules" in sections and isinstance((rules := sections["rules"].node).value, list):
        items = [_kind(rule) if isinstance(rule.value, str) else rule for rule in rules.value]
        sections["rules"] = Entry(sections["rules"].key_origin, Node(items, rules.origin))
    return Node(sections, root.origin)


def _kind(name: Node) -> Node:
    return Node({"kind": Entry(name.origin, name)}, name.origin)


def _kinds_differ(base: dict[Key, Entry], over: dict[Key, Entry]) -> bool:
    return "kind" in base and "kind" in over and base["kind"].node.value != over["kind"].node.value


def _spelled_out(node: Node) -> Node:
    """A plugin given from Python as the mapping that a recipe would have."""
    return from_python(plain(node.value), node.origin.source) if isinstance(node.value, Plugin) else node


def _assign(node: Node, path: list[Key], depth: int, value: Node) -> Node:
    if depth == len(path):
        return merge(node, value)
    node, step, place = _spelled_out(node), path[depth], dotted(path[:depth])

    def refuse(message: str) -> NoReturn:
        raise RecipeError(message, path=place, origin=str(value.origin))

    if isinstance(node.value, list):
        if not isinstance(step, int) or step >= len(node.value):
            last = len(node.value) - 1
            items = f"its items are 0 to {last}" if last > 0 else "its only item is 0" if last == 0 else "it is empty"
            refuse(f"has no item {step!r}: {items}")
        changed = list(node.value)
        changed[step] = _assign(changed[step], path, depth + 1, value)
        return Node(changed, node.origin)
    if node.value is not None and not isinstance(node.value, dict):
        refuse(f"is {shown(node.value)} and has no {step!r} inside")
    inside = node.value[step].node if node.value and step in node.value else Node(None, value.origin)
    return merge(node, Node({step: Entry(value.origin, _assign(inside, path, depth + 1, value))}, value.origin))
