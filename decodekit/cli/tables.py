"""The tables of plugins in documents, generated from the registry: ``python -m decodekit.cli.tables README.md ...``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from decodekit.core import registry
from decodekit.core.protocols import Plugin

_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def plugin_table(group: str) -> str:
    """A Markdown table of decodekit's own plugins of a group."""
    rows = ["| kind | what it does | options (default) | source | cost |", "|---|---|---|---|---|"]
    for info in registry.inventory():
        if info.group == group and info.distribution == registry.OWN_DISTRIBUTION:
            plugin = registry.load(group, f"{info.distribution}:{info.kind}")
            module = inspect.getdoc(inspect.getmodule(plugin)) or ""
            what = module.splitlines()[0].rstrip(".").replace("``", "`")
            cells = (f"`{info.kind}`", what, _options(plugin), _source(plugin), info.cost)
            rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def refresh(text: str) -> str:
    """``text`` with every ``<!-- table: GROUP -->`` block made anew."""
    return _BLOCK.sub(lambda match: match[1] + plugin_table(match[2]) + match[3], text)


def options_of(plugin: type[Plugin]) -> Iterator[tuple[str, str, str]]:
    """(name as it is written, default or nothing, description) of each option of a plugin."""
    for name, field in plugin.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        # An empty default means "not given": there is nothing to show.
        empty = default is None or (hasattr(default, "__len__") and not default)
        if name != "kind":
            value = "" if empty else str(getattr(default, "kind", default)).replace("\n", "\\n")
            yield field.alias or name, value, field.description or ""


def _options(plugin: type[Plugin]) -> str:
    return ", ".join(f"`{name}`" + (f" ({default})" if default else "") for name, default, _ in options_of(plugin))


def _source(plugin: type[Plugin]) -> str:
    text = inspect.getdoc(plugin) or ""
    if found := re.search(r"arXiv:(\d{4}\.\d{5})", text):
        return f"[{found[1]}](https://arxiv.org/abs/{found[1]})"
    found = re.search(r"https://\S+\w", text)
    return f"[web]({found[0]})" if found else ""


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(refresh(path.read_text(encoding="utf-8")), encoding="utf-8")
