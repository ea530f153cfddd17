"""Quantized K/V beside full precision: bytes, greedy agreement, and whether a passkey is found in a long prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from decodekit.cache.paged import PagedCache
from decodekit.core.compat import CACHE_KEY

KINDS = ("int8", "fp8", "int4", "int2")
BLOCK_SIZE = 16
NEW_TOKENS = 64
ANSWER_TOKENS = 12
CASES = 10
FILLER_TOKENS = (400, 800)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a kind, full precision (``none``) first.

    - ``kv_share``: bytes of K/V over those of full precision, after the passkey prompts.
    - ``same_token``: of the positions of full precision's own output, where the same token has the largest logit.
    - ``same_prefix``: of the new tokens of free-running greedy decoding, those before the first that differs.
    - ``logit_error``: mean absolute difference of the logits at these positions.
    - ``passkeys``: of ``CASES``, how often greedy decoding gives the five digits that a prompt hides.
    """
    chats = [_chat(tokenizer, text) for text in prompts]
    hidden = [_passkey(tokenizer, case) for case in range(CASES)]
    status("full precision")
    expected, reference, _ = _greedy(model, chats, NEW_TOKENS, None)
    lengths = [
        tokens.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in tokens else NEW_TOKENS
        for tokens in expected
    ]
    asked = (torch.arange(NEW_TOKENS) < torch.tensor(lengths).unsqueeze(1)).to(reference.device)
    full_bytes = 0
    rows = []
    for kind in (None, *KINDS):
        status(f"quantization {kind or 'none'}")
        outputs, logits = (
            (_greedy(model, chats, NEW_TOKENS, kind)[0], _greedy(model, chats, NEW_TOKENS, kind, forced=expected)[1])
            if kind
            else (expected, reference)
        )
        answers, _, kv_bytes = _greedy(model, [ids for ids, _ in hidden], ANSWER_TOKENS, kind)
        full_bytes = full_bytes or kv_bytes
        found = sum(key in tokenizer.decode(answer) for (_, key), answer in zip(hidden, answers, strict=True))
        same = sum(
            _common(own[:length], full[:length]) for own, full, length in zip(outputs, expected, lengths, strict=True)
        )
        rows.append(
            {
                "quantization": kind or "none",
                "kv_share": kv_bytes / full_bytes,
                "same_token": float((logits.argmax(2) == reference.argmax(2))[asked].float().mean()),
                "same_prefix": same / sum(lengths),
                "logit_error": float((logits - reference).abs().mean(2)[asked].mean()),
                "passkeys": f"{found}/{CASES}",
            }
        )
    return rows


@torch.inference_mode()
def _greedy(
    model: Any, prompts: list[list[int]], new_tokens: int, kind: Any, forced: list[list[int]] | None = None
) -> tuple[list[list[int]], Tensor, int]:
    """Decode rows together, past their ends of sequence; ``forced`` tokens are forwarded in place of the likeliest.

    Returns:
        the likeliest tokens [R][new_tokens], their logits [R, new_tokens, V], and the bytes of K/V in the end.
    """
    blocks = sum(-(-(len(prompt) + new_tokens) // BLOCK_SIZE) for prompt in prompts)
    cache = PagedCache(
        model.config,
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        device=model.device,
        quantization=kind,
        prefix_cache=False,
    )

    def forward(rows: list[int], tokens: list[list[int]]) -> Tensor:
        with cache.begin(rows, tokens) as step:
            inputs = {"attention_mask": step.attention_mask, "position_ids": step.position_ids, CACHE_KEY: cache}
            output = model(torch.tensor(tokens, device=model.device), use_cache=True, logits_to_keep=1, **inputs)
        return output.logits[:, -1].float()

    rows = cache.open(prompts)
    logits = [torch.cat([forward([row], [prompt]) for row, prompt in zip(rows, prompts, strict=True)])]
    for place in range(new_tokens - 1):
        likeliest = logits[-1].argmax(1).tolist() if forced is None else [tokens[place] for tokens in forced]
        logits.append(forward(rows, [[token] for token in likeliest]))
    stacked = torch.stack(logits, dim=1)
    return stacked.argmax(2).tolist(), stacked, cache.stats()["kv_bytes"]


def _passkey(tokenizer: Any, case: int) -> tuple[list[int], str]:
    """The ids of a prompt of ``FILLER_TOKENS`` with five digits somewhere in it, and these digits."""
    source = random.Random(case)
    key = str(source.randint(10000, 99999))
    shortest, longest = FILLER_TOKENS
    length = shortest + (longest - shortest) * case // max(1, CASES - 1)
    sentences = -(-length // len(tokenizer(FILLER, add_special_tokens=False).input_ids))
    before = source.randint(0, sentences)
    text = f"{FILLER * before}The pass key is {key}. Remember it. {FILLER * (sentences - before)}"
    return _chat(tokenizer, f"{text}\nWhat is the pass key? Answer with the number only."), key


def _chat(tokenizer: Any, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(text).input_ids)
    messages = [{"role": "user", "content": text}]
    templated = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(templated, add_special_tokens=False).input_ids)


def _common(tokens: list[int], others: list[int]) -> int:
    """How many first tokens are the same."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False))))
