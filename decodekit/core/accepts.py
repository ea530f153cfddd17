"""Whether a text belongs to a constraint, asked of its masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from decodekit.core import registry
from decodekit.core.constraint import is_legal, mask_words
from decodekit.core.errors import InputError, UnsupportedConstraint
from decodekit.core.protocols import Constraint
from decodekit.core.vetting import vet
from decodekit.core.vocabulary import Vocabulary


def accepts(constraint: Constraint | Mapping[str, Any], text: str, tokenizer: Any) -> bool:
    """Whether a constraint lets ``text`` through: each of its tokens is in the mask, and then it may end.

    Args:
        constraint: a constraint, or its options with ``kind``.
        text: a whole output.
        tokenizer: of the model.

    Raises:
        UnsupportedConstraint: the masks are not exact; names the keywords that they cannot enforce.
        InputError: the constraint is no language, or the tokenizer cannot spell the text.
    """
    plugin = registry.create("constraints", constraint) if isinstance(constraint, Mapping) else constraint
    if not isinstance(plugin, Constraint):
        raise InputError(f"expected a constraint or its options with 'kind', got {type(plugin).__name__}")
    vocabulary = Vocabulary.of(tokenizer)
    resolved = plugin.resolve(tokenizer)
    vet(resolved)
    compiled = resolved.compile(vocabulary)
    if not compiled.exact:
        raise UnsupportedConstraint(
            f"the masks of {plugin.kind!r} do not enforce {', '.join(compiled.unsupported)}", compiled.unsupported
        )
    state = compiled.start()
    mask = torch.zeros(1, mask_words(vocabulary.width), dtype=torch.int32)
    for token in vocabulary.encode(text, first=True):
        state.mask(mask, 0)
        if not is_legal(mask[0], token):
            return False
        state.advance(token)
    return state.is_accepting()
