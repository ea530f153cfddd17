"""decodekit's rules as logits processors, for plain ``generate``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers.generation import LogitsProcessor

from decodekit.core.errors import InputError, Refused
from decodekit.core.protocols import Rule
from decodekit.core.random import Stream, fresh_seed, prompt_digest
from decodekit.core.types import Rows


def as_logits_processor(rule: Rule, tokenizer: Any, *, seed: int | None = None) -> LogitsProcessor:
    """A rule as a ``LogitsProcessor`` for ``generate(logits_processor=[...])``.

    A processor is told neither where the prompt ends nor what is padding: the prompt is what the first call holds, pads are
    the leading pad ids of the tokenizer. Use a new one for each ``generate``.

    Args:
        rule: a rule without state of its own.
        tokenizer: for the rule's texts, the pad and the EOS id.
        seed: of the rule's own draws; a fresh one by default.

    Raises:
        Refused: the rule keeps state, which beams would mix up here; use a Decoder.
        InputError: not a rule, or no tokenizer.
    """
    if not isinstance(rule, Rule):
        raise InputError(f"expected a decodekit rule, got {type(rule).__name__}")
    if tokenizer is None:
        raise InputError(
            f"as_logits_processor({rule.kind!r}, ...) needs the model's tokenizer, to tell pads and the EOS id"
        )
    if type(rule).init_state is not Rule.init_state:
        raise Refused(f"rule {rule.kind!r} keeps state for each row, which plain generate cannot carry; use a Decoder")
    return _RuleProcessor(rule.resolve(tokenizer), tokenizer, fresh_seed() if seed is None else seed)


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
