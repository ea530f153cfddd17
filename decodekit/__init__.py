"""decodekit: decoding strategies, logits rules and recipes over Hugging Face ``generate``.

decoder = decodekit.load("recipe.yaml")
model.generate(**inputs, custom_generate=decoder)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from decodekit.cache.ledger import ledger
    from decodekit.cache.paged import PagedCache
    from decodekit.core.accepts import accepts
    from decodekit.core.candidates import Cancel, Candidate, Decision, Failed, Finished, Progress, Start, Wait
    from decodekit.core.constraint import CompiledConstraint, ConstraintState
    from decodekit.core.drafts import Draft, DraftHost, DraftRow, DraftState, Verified
    from decodekit.core.errors import (
        DecodekitError,
        InputError,
        PluginError,
        RecipeError,
        Refused,
        RowError,
        UnsupportedConstraint,
    )
    from decodekit.core.protocols import (
        Constraint,
        Drafter,
        Rule,
        Scorer,
        SearchStrategy,
        SequenceStrategy,
        TokenStrategy,
        Utility,
    )
    from decodekit.core.search import Advance, Ended, Group, Hypothesis
    from decodekit.core.types import Branch, Need, Output, Outputs, Request, Rows
    from decodekit.core.vocabulary import Vocabulary
    from decodekit.integrations.processors import as_logits_processor
    from decodekit.runtime.api import load, strategy
    from decodekit.runtime.decoder import Decoder
    from decodekit.runtime.engine import Engine

# Imported on first use: ``import decodekit`` and the command line stay fast, and nothing loads torch before it must.
_HOME = {
    "decodekit.cache.ledger": ("ledger",),
    "decodekit.cache.paged": ("PagedCache",),
    "decodekit.core.accepts": ("accepts",),
    "decodekit.core.candidates": (
        "Cancel",
        "Candidate",
        "Decision",
        "Failed",
        "Finished",
        "Progress",
        "Start",
        "Wait",
    ),
    "decodekit.core.constraint": ("CompiledConstraint", "ConstraintState"),
    "decodekit.core.drafts": ("Draft", "DraftHost", "DraftRow", "DraftState", "Verified"),
    "decodekit.core.errors": (
        "DecodekitError",
        "InputError",
        "PluginError",
        "RecipeError",
        "Refused",
        "RowError",
        "UnsupportedConstraint",
    ),
    "decodekit.core.protocols": (
        "Constraint",
        "Drafter",
        "Rule",
        "Scorer",
        "SearchStrategy",
        "SequenceStrategy",
        "TokenStrategy",
        "Utility",
    ),
    "decodekit.core.search": ("Advance", "Ended", "Group", "Hypothesis"),
    "decodekit.core.types": ("Branch", "Need", "Output", "Outputs", "Request", "Rows"),
    "decodekit.core.vocabulary": ("Vocabulary",),
    "decodekit.integrations.processors": ("as_logits_processor",),
    "decodekit.runtime.api": ("load", "strategy"),
    "decodekit.runtime.decoder": ("Decoder",),
    "decodekit.runtime.engine": ("Engine",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'decodekit' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
