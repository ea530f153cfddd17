"""Where plugins are called: what they raise names them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from decodekit.core.errors import DecodekitError, PluginError
from decodekit.core.protocols import Plugin


@contextmanager
def guarded(plugin: Plugin, hook: str) -> Iterator[None]:
    """Errors that decodekit raises on purpose pass; any other is a fault of the plugin.

    Raises:
        PluginError: names the plugin, the hook and the error.
    """
    try:
        yield
    except DecodekitError:
        raise
    except Exception as error:
        raise PluginError(f"{plugin.kind!r} failed in {hook}: {type(error).__name__}: {error}") from error
