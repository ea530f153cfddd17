"""``decodekit export`` and ``new``: folders that others run and extend."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from pydantic import BaseModel

from decodekit import __version__
from decodekit.cli.console import results
from decodekit.core import registry
from decodekit.core.errors import InputError, nearest
from decodekit.core.protocols import Plugin
from decodekit.recipe import load_recipe

NEW_KINDS = {
    "rule": "rules",
    "strategy": "strategies",
    "constraint": "constraints",
    "drafter": "drafters",
    "scorer": "scorers",
    "utility": "utilities",
}


def export_recipe(recipe: str, directory: Path, settings: Sequence[str]) -> int:
    """Write ``custom_generate/generate.py`` with the recipe inside, its requirements and a card."""
    loaded = load_recipe(recipe, set_values=settings)
    distributions = dict(map(registry.origin, _plugins(loaded))) | {registry.OWN_DISTRIBUTION: __version__}
    document = loaded.to_dict()
    values = {
        "title": Path(recipe).stem,
        "recipe": json.dumps(document, indent=4, ensure_ascii=True),
        # As a Python literal: a text in the recipe must never be able to end it.
        "literal": repr(json.dumps(document)),
        "requirements": "\n".join(f"{name}>={version}" for name, version in sorted(distributions.items())),
    }
    _write_all("export", _fresh(directory), values)
    results.print(
        f"wrote {directory}: model.generate(**inputs, custom_generate={str(directory)!r}, trust_remote_code=True)",
        markup=False,
        soft_wrap=True,
    )
    return 0


def new_plugin(kind: str, name: str) -> int:
    """Write a package with one plugin of this kind and the laws as its tests, in ``decodekit-NAME``."""
    if kind not in NEW_KINDS:
        raise InputError(f"unknown plugin kind {kind!r}: {nearest(kind, NEW_KINDS)}")
    if keyword.iskeyword(name):
        raise InputError(f"{name!r} is a keyword of Python; choose another name, such as my_{name.lower()}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(_camel(name)):
        close = name.lower().replace("-", "_")
        hint = f"did you mean {close}?" if re.fullmatch(r"[a-z][a-z0-9_]*", close) else "such as top_secret"
        raise InputError(f"a plugin name is lower-case letters, digits and underscores; got {name!r}: {hint}")
    if name in registry.kinds(NEW_KINDS[kind]):
        owner = registry.distribution_of(registry.find(NEW_KINDS[kind], name))
        raise InputError(f"{kind} {name!r} is already in {owner}; choose another name")
    directory = Path(f"decodekit-{name.replace('_', '-')}")
    values = {
        "name": name,
        "kind": kind,
        "dist": directory.name,
        "package": f"decodekit_{name}",
        "cls": _camel(name),
        "group": NEW_KINDS[kind],
    }
    for template in ("plugin", kind):
        _write_all(template, _fresh(directory) if template == "plugin" else directory, values)
    results.print(
        f"wrote {directory}: pip install -e '{directory}[test]' && python -m pytest {directory}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _fresh(directory: Path) -> Path:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{str(directory)!r} is already there and not an empty folder; name a new one")
    return directory


def _plugins(value: Any) -> Iterator[Plugin]:
    """Every plugin of a recipe, nested ones too."""
    if isinstance(value, Plugin):
        yield value
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _plugins(getattr(value, name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _plugins(item)


def _write_all(template: str, directory: Path, values: dict[str, str]) -> None:
    """Fill every file of a template folder; ``__package__`` in a name stands for the package, ``.in`` is dropped."""
    root = files("decodekit.cli") / "templates" / template
    with_root = Path(str(root))
    for source in sorted(path for path in with_root.rglob("*.in")):
        relative = str(source.relative_to(with_root)).removesuffix(".in")
        target = directory / relative.replace("__package__", values.get("package", "")).replace(
            "__name__", values.get("name", "")
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(source.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
