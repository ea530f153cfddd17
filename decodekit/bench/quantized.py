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
CASES = 10
FILLER_TOKENS = (400, 800)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def run(model: Any, tokenizer: Any, prompts: Sequence[str], status: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row a kind, full precision (``none``) first.

    - ``kv_share``: bytes of K/V over those of full precision, after the longest passkey prompt.
    - ``same_token``: of the positions of full precision's own output, where the same token has the largest logit.
    - ``same_prefix``: of the new tokens of free-running greedy decoding, those before the first that differs.
    - ``logit_error``: mean absolute difference of the logits at these positions.
    - ``passkeys``: of ``CASES``, how often greedy decoding gives the five digits that a prompt hides.
    """
    chats = [_chat(tokenizer, text) for text in prompts]
    hidden = [_passkey(tokenizer, case) for case in range(CASES)]
    expected: list[list[int]] = []
    reference: list[Tensor] = []
    full_bytes = 0
    rows = []
    for kind in (None, *KINDS):
        status(f"quantization {kind or 'none'}: greedy decoding")
        outputs = [_greedy(model, ids, NEW_TOKENS, kind)[0] for ids in chats]
        expected = expected or outputs
        logits = [_forced(model, ids, tokens, kind) for ids, tokens in zip(chats, expected, strict=True)]
        reference = reference or logits
        status(f"quantization {kind or 'none'}: passkeys")
        found, held = 0, 0
        for ids, key in hidden:
            answer, kv_bytes = _greedy(model, ids, 12, kind)
            found += key in tokenizer.decode(answer)
            held = max(held, kv_bytes)
        full_bytes = full_bytes or held
        total = sum(map(len, expected))
        pairs = list(zip(logits, reference, strict=True))
        rows.append(
            {
                "quantization": kind or "none",
                "kv_share": held / full_bytes,
                "same_token": sum(int((own.argmax(1) == full.argmax(1)).sum()) for own, full in pairs) / total,
                "same_prefix": sum(map(_common, outputs, expected)) / total,
                "logit_error": float(torch.cat([(own - full).abs().flatten() for own, full in pairs]).mean()),
                "passkeys": f"{found}/{CASES}",
            }
        )
    return rows


def _cache(model: Any, tokens: int, kind: Any) -> PagedCache:
    blocks = -(-tokens // BLOCK_SIZE)
    return PagedCache(
        model.config,
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        device=model.device,
        quantization=kind,
        prefix_cache=False,
    )


def _greedy(model: Any, ids: list[int], new_tokens: int, kind: Any) -> tuple[list[int], int]:
    """The new tokens, and the bytes of K/V after the last of them."""
    cache = _cache(model, len(ids) + new_tokens, kind)
    prompt = torch.tensor([ids], device=model.device)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        top_k=None,
        top_p=None,
        temperature=None,
        **{CACHE_KEY: cache},
    )
    return output[0, len(ids) :].tolist(), cache.stats()["kv_bytes"]


@torch.inference_mode()
def _forced(model: Any, ids: list[int], tokens: list[int], kind: Any) -> Tensor:
    """Logits [len(tokens), V] of a prompt and of each of these tokens but the last, one forward each."""
    cache = _cache(model, len(ids) + len(tokens), kind)
    [row] = cache.open([ids])
    logits = []
    for new in (ids, *([token] for token in tokens[:-1])):
        with cache.begin([row], [new]) as step:
            output = model(
                torch.tensor([new], device=model.device),
                attention_mask=step.attention_mask,
                position_ids=step.position_ids,
                use_cache=True,
                **{CACHE_KEY: cache},
            )
        logits.append(output.logits[0, -1].float())
    return torch.stack(logits)


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
