"""decodekit's rules and constraints as logits processors, for plain ``generate``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation import LogitsProcessor

from decodekit.core import registry
from decodekit.core.constraint import CompiledConstraint, ConstraintState, legal_only, mask_words
from decodekit.core.errors import InputError, Refused, RowError
from decodekit.core.protocols import Constraint, Rule
from decodekit.core.random import Stream, fresh_seed, prompt_digest
from decodekit.core.types import Rows
from decodekit.core.vetting import vet
from decodekit.core.vocabulary import Vocabulary


def as_logits_processor(
    plugin: Rule | Constraint | Mapping[str, Any], tokenizer: Any, *, seed: int | None = None
) -> LogitsProcessor:
    """A rule or a constraint as a ``LogitsProcessor`` for ``generate(logits_processor=[...])``.

    A processor is told neither where the prompt ends nor what is padding: the prompt is what the first call holds, pads are
    the leading pad ids of the tokenizer. Use a new one for each ``generate``. Put a constraint last.

    Args:
        plugin: a constraint, or a rule without state of its own; or its options with ``kind``.
        tokenizer: for the plugin's texts and tokens, the pad and the EOS id.
        seed: of the rule's own draws; a fresh one by default.

    Raises:
        Refused: the rule keeps state, which beams would mix up here; use a Decoder.
        InputError: neither a rule nor a constraint, or no tokenizer.
        PluginError, RecipeError: the options name no plugin, or are not its.
    """
    if isinstance(plugin, Mapping):
        group = "constraints" if plugin.get("kind") in registry.kinds("constraints") else "rules"
        plugin = cast(Rule | Constraint, registry.create(group, plugin))
    if not isinstance(plugin, (Rule, Constraint)):
        raise InputError(
            f"expected a rule or a constraint, or its options such as {{'kind': 'min_p', 'p': 0.1}}, got "
            f"{type(plugin).__name__}"
        )
    if tokenizer is None:
        raise InputError(
            f"as_logits_processor({plugin.kind!r}, ...) needs the model's tokenizer, to tell pads and the EOS id"
        )
    if isinstance(plugin, Constraint):
        return _ConstraintProcessor(plugin.resolve(tokenizer), tokenizer)
    if type(plugin).init_state is not Rule.init_state:
        raise Refused(
            f"rule {plugin.kind!r} keeps state for each row, which plain generate cannot carry; use a Decoder"
        )
    return _RuleProcessor(plugin.resolve(tokenizer), tokenizer, fresh_seed() if seed is None else seed)


class _ConstraintProcessor(LogitsProcessor):
    """States are found by what a row has generated: beams change places between calls."""

    def __init__(self, constraint: Constraint, tokenizer: Any) -> None:
        self._constraint, self._tokenizer = constraint, tokenizer
        self._compiled: CompiledConstraint | None = None
        self._prompt_width = 0
        self._states: dict[tuple[int, ...], ConstraintState | None] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows, width = scores.shape
        if self._compiled is None:
            vet(self._constraint)
            self._compiled = self._constraint.compile(Vocabulary.of(self._tokenizer, width))
            self._prompt_width = input_ids.shape[1]
        outputs = [tuple(row) for row in input_ids[:, self._prompt_width :].tolist()]
        self._states = {output: self._state(self._compiled, output) for output in outputs}
        mask = torch.full((rows, mask_words(width)), -1, dtype=torch.int32)
        for row, output in enumerate(outputs):
            if (state := self._states[output]) is not None:
                state.mask(mask, row)
        masked = legal_only(scores, [*mask])
        if (empty := masked.amax(-1) == -math.inf).any():
            row = int(empty.nonzero()[0])
            raise RowError(
                f"row {row}: every token that constraint {self._constraint.kind!r} allows is banned by what came before it"
            )
        return masked

    def _state(self, compiled: CompiledConstraint, output: tuple[int, ...]) -> ConstraintState | None:
        """``None`` for rows that ended, and for beams that generate fills up with banned tokens when too few are legal."""
        if not output:
            return compiled.start()
        earlier = output[:-1]
        before = self._states[earlier] if earlier in self._states else self._state(compiled, earlier)
        if before is None or output[-1] == self._tokenizer.eos_token_id:
            return None
        state = before.fork()
        try:
            state.advance(output[-1])
        except RowError:
            return None
        return state


class _RuleProcessor(LogitsProcessor):
    def __init__(self, rule: Rule, tokenizer: Any, seed: int) -> None:
        self._rule = rule
        self._pad, self._eos, self._seed = tokenizer.pad_token_id, tokenizer.eos_token_id, seed
        self._width: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows, width = input_ids.shape
        if self._width is None:
            self._width = width
        pads = self._leading_pads(input_ids[:, : self._width])
        # Left-align each row: rules know no pads.
        column = torch.arange(width, device=input_ids.device) + pads.unsqueeze(-1)
        tokens = input_ids.gather(1, column.clamp(max=width - 1))
        seen: Counter[int] = Counter()
        streams = []
        for row, skipped in zip(input_ids[:, : self._width].tolist(), pads.tolist(), strict=True):
            digest = prompt_digest(row[skipped:])
            streams.append(Stream(self._seed, seen[digest], digest))
            seen[digest] += 1
        own = Rows(
            tokens=tokens,
            lengths=width - pads,
            prompt_lengths=self._width - pads,
            requests=range(rows),
            streams=streams,
            eos=() if self._eos is None else (self._eos,),
        )
        return self._rule(own, scores)

    def _leading_pads(self, prompts: Tensor) -> Tensor:
        if self._pad is None:
            return torch.zeros(prompts.shape[0], dtype=torch.long, device=prompts.device)
        return (prompts == self._pad).long().cumprod(-1).sum(-1).clamp(max=prompts.shape[1] - 1)
