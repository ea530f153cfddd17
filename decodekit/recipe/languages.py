"""Whether a constraint is a language, found out without a model."""

from __future__ import annotations

from decodekit.core import options
from decodekit.core.errors import InputError, UnsupportedConstraint
from decodekit.core.protocols import Constraint
from decodekit.core.vetting import byte_vocabulary, vet


def language_faults(constraint: Constraint, loc: options.Loc) -> list[options.Fault]:
    """What is wrong with a constraint, at the innermost ones that are wrong of a combination; empty for a good one.

    It is compiled over single bytes, which a model's tokens are made of. One that needs the tokenizer is not looked at.

    Args:
        constraint: validated.
        loc: where it stands in the recipe.
    """
    message = _fault(constraint)
    if message is None:
        return []
    inside = [fault for place, member in _members(constraint) for fault in language_faults(member, (*loc, *place))]
    return inside or [options.Fault(loc, options.WRONG, message)]


def _fault(constraint: Constraint) -> str | None:
    try:
        resolved = constraint.resolve(None)
    except InputError:
        return None
    try:
        vet(resolved)
        resolved.compile(byte_vocabulary())
    except (InputError, UnsupportedConstraint) as error:
        return str(error)
    return None


def _members(constraint: Constraint) -> list[tuple[options.Loc, Constraint]]:
    return [
        ((name, index), item)
        for name in type(constraint).model_fields
        if isinstance(items := getattr(constraint, name), tuple)
        for index, item in enumerate(items)
        if isinstance(item, Constraint)
    ]
