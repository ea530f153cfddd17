"""Errors that say what was given, what was expected and how to get there, in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DecodekitError(Exception):
    """Base of every error decodekit raises on purpose."""


class InputError(DecodekitError, ValueError):
    """A prompt, option or file that cannot be used as given."""


class Refused(DecodekitError, ValueError):
    """A combination that cannot be honoured; raised before the prompt is prefilled."""


class RecipeError(InputError):
    """A recipe that cannot be read; names the file, line, column and path of the fault.

    Args:
        message: what is wrong and what would be right.
        path: the dotted place inside the recipe, such as ``rules.0.p``.
        origin: where it was written: ``file:line:column``, ``--set a.b=c`` or ``recipe`` for a dict.
    """

    def __init__(self, message: str, *, path: str = "", origin: str = "recipe") -> None:
        self.path, self.origin = path, origin
        super().__init__(": ".join(part for part in (origin, path, message) if part))


class PluginError(DecodekitError):
    """A plugin that is unknown, ambiguous, not allowed, broken at import, or that broke its contract."""


class RowError(DecodekitError):
    """One row that cannot go on; the other rows of its batch do."""


class UnsupportedConstraint(Refused):
    """A constraint that no engine can enforce exactly.

    Args:
        message: what was given.
        keywords: the keywords that cannot be enforced.
    """

    def __init__(self, message: str, keywords: Iterable[str] = ()) -> None:
        self.keywords = tuple(keywords)
        super().__init__(message)


def dotted(steps: Iterable[object]) -> str:
    """The place inside a recipe, such as ``rules.0.p``; a key that would break the line or drown it is quoted or cut."""
    return ".".join(_step(str(step)) for step in steps)


def _step(text: str) -> str:
    text = text if len(text) <= 60 else f"{text[:60]}..."
    return text if text.isprintable() else repr(text)


def reason(error: BaseException) -> str:
    """What an error says, in words that stand alone: one that nobody raised on purpose also tells its type."""
    return str(error) if isinstance(error, DecodekitError) else f"{type(error).__name__}: {error}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``did you mean 'top_p'? (known: ...)`` for a name that is not among ``known``.

    A long list is left out where near names say enough.
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    listed = f"known: {', '.join(known)}" if known else "none is installed"
    if close and len(known) > 20:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"did you mean {' or '.join(map(repr, close))}? ({listed})" if close else listed
