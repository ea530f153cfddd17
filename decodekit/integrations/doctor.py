"""Does this model decode right? The laws that decoding relies on, each measured on the user's own model.

Numbers are differences of logits relative to the largest one, unless a law says otherwise. A law that fails names what not to
use with this model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from decodekit.cache.paged import PagedCache
from decodekit.core import compat
from decodekit.core.errors import Refused
from decodekit.recipe import load_recipe
from decodekit.runtime.branches import left_pad
from decodekit.runtime.decoder import Decoder
from decodekit.runtime.forward import RaggedForward, Stepper, inputs_of
from decodekit.runtime.text import TextTracker

TEXTS = (
    "The lamp is red while it charges and green when it is full; it blinks when something is broken.",
    "Who won?",
    "1 2 3 1 2 3 1 2 3 1 2 3 1 2 3 and then once more, 1 2 3.",
    "def area(width, height):\n    return width * height\n",
)
HARD_TEXTS = (*TEXTS, "naïve café 日本語 🤗 end", "tabs\tand  two spaces\n\n  indented", '{"key": [1, 2.5, "ü"]}')
NEW = 6
"""Tokens at the end of each text that are forwarded after the rest."""

LIMITS = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Largest difference by dtype; recurrent layers compute in float32 whatever the model's is."""

DIVERGENCE = "nats a token"
"""What fewer bits of K/V are measured in."""

LIMITS_BY_UNIT = {"texts": 0.0, DIVERGENCE: 0.05}

_LARGEST_COPY = 2 * 1024**3


@dataclass(frozen=True)
class Finding:
    """What became of one law.

    Attributes:
        law: what should hold.
        status: ``refused``: decodekit does not do it with this model, so that nothing can go wrong.
        value: what was measured; infinite where nothing could be.
        limit: most that is right.
        note: what the number is of, or why there is none.
        avoid: what not to use with this model; only where the law fails.
    """

    law: str
    status: Literal["holds", "fails", "refused"]
    value: float
    limit: float
    note: str = ""
    avoid: str = ""


class Patient:
    """A model with prompts of different lengths, their tails, and what a forward without any cache says of them."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.rows = [[*tokenizer(text, add_special_tokens=False).input_ids] for text in TEXTS]
        self.limit = LIMITS.get(model.dtype, LIMITS[torch.bfloat16])

    @cached_property
    def truth(self) -> list[Tensor]:
        """[n, V] of every row, without a cache and alone."""
        return [self.forward([ids], use_cache=False)[0] for ids in self.rows]

    def forward(self, ids: Sequence[Sequence[int]], **inputs: Any) -> Tensor:
        """[R, q, V] logits on the CPU."""
        given = {"attention_mask": torch.ones(len(ids), len(ids[0]), dtype=torch.long), **inputs}
        given = {
            name: value.to(self.model.device) if isinstance(value, Tensor) else value for name, value in given.items()
        }
        logits: Tensor = self.model(torch.tensor(ids, device=self.model.device), **given).logits
        return logits.double().cpu()

    def stepper(self, rows: Sequence[Sequence[int]]) -> Stepper:
        """These prompts, left-padded, over transformers' own cache."""
        ids, mask = left_pad(rows, self.tokenizer.pad_token_id or 0, self.model.device)
        return Stepper(self.model, compat.prepare(self.model, ids, mask, max_new_tokens=NEW + 1, use_cache=True))

    def paged(self, **options: Any) -> _Paged:
        """An empty cache of blocks."""
        return _Paged(self.model, **options)


class _Paged:
    """Rows of a paged cache, forwarded in as many steps as the model needs."""

    def __init__(self, model: Any, **options: Any) -> None:
        options = {"num_blocks": 512, "block_size": 4, "device": model.device, **options}
        self.cache = PagedCache(model.config, **options)
        self._forward = RaggedForward(model, self.cache)

    def open(self, ids: Sequence[int]) -> int:
        """A row for a prompt."""
        return self.cache.open([list(ids)])[0]

    def extend(self, row: int, ids: Sequence[int], most: int = 1 << 30) -> Tensor:
        """[n, V] of the next tokens of a row, at most so many a step."""
        parts, done = [], 0
        while done < len(ids):
            count = self.cache.max_query(row, min(most, len(ids) - done))
            raw = self._forward([row], [ids[done : done + count]], last=count)
            parts.append(raw.logits[0, -count:].double().cpu())
            done += count
        return torch.cat(parts)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest finite expected logit; infinite with a NaN."""
    scale = expected[expected.isfinite()].abs().max().clamp(min=1e-30)
    apart = torch.where(found == expected, 0.0, (found - expected).abs()) / scale
    return float(apart.nan_to_num(math.inf).max())


def worst(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest :func:`difference` between what was found and what is right, [..., V] each."""
    return max(difference(found, expected) for found, expected in pairs)


def _cached(patient: Patient) -> float:
    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for ids, truth in zip(patient.rows, patient.truth, strict=True):
            stepper, start = patient.stepper([ids[:-NEW] or ids[:1]]), max(len(ids) - NEW, 1)
            yield stepper.prefill().logits[0, -1].double().cpu(), truth[start - 1]
            for place in range(start, len(ids)):
                logits = stepper.step(torch.tensor([ids[place]], device=patient.model.device)).logits
                yield logits[0, -1].double().cpu(), truth[place]

    return worst(pairs())


def _in_blocks(patient: Patient, most: int = 1 << 30) -> float:
    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        loop = patient.paged()
        for ids, truth in zip(patient.rows, patient.truth, strict=True):
            row = loop.open(ids)
            yield loop.extend(row, ids[:-NEW], most) if len(ids) > NEW else truth[:0], truth[: max(len(ids) - NEW, 0)]
            for place in range(max(len(ids) - NEW, 0), len(ids)):
                yield loop.extend(row, [ids[place]]), truth[place : place + 1]

    return worst([pair for pair in pairs() if len(pair[0])])


def _left_padding(patient: Patient) -> float:
    cut = min(NEW, min(map(len, patient.rows)) - 1)
    stepper = patient.stepper([ids[: len(ids) - cut] for ids in patient.rows])
    logits, found = stepper.prefill().logits[:, -1], []
    for back in range(cut, 0, -1):
        found += [(own, truth[-back - 1]) for own, truth in zip(logits.double().cpu(), patient.truth, strict=True)]
        fed = torch.tensor([ids[-back] for ids in patient.rows], device=patient.model.device)
        logits = stepper.step(fed).logits[:, -1]
    found += [(own, truth[-1]) for own, truth in zip(logits.double().cpu(), patient.truth, strict=True)]
    return worst(found)


def _mask_polarity(patient: Patient) -> float:
    ids, other = patient.rows[1], patient.rows[0][:5]
    mask = torch.tensor([[0] * len(other) + [1] * len(ids)])
    inputs = {"attention_mask": mask, "use_cache": False}
    found = [patient.forward([[*junk, *ids]], **inputs)[0, len(other) :] for junk in (other, other[::-1])]
    return difference(found[0], found[1])


def _mask_length(patient: Patient) -> float:
    ids, truth = patient.rows[0], patient.truth[0]
    stepper = patient.stepper([ids[:-1]])
    cache = stepper.prefill()[compat.CACHE_KEY]
    mask, positions = torch.ones(1, len(ids), dtype=torch.long), torch.tensor([[len(ids) - 1]])
    inputs = {"attention_mask": mask, compat.CACHE_KEY: cache, "use_cache": True}
    found = patient.forward([ids[-1:]], **inputs, **_accepted(patient.model, position_ids=positions))
    return difference(found[0, -1], truth[-1])


def _chunked(patient: Patient) -> float:
    ids, truth = patient.rows[0], patient.truth[0]
    inputs, mask = left_pad([ids], 0, patient.model.device)
    options = {"prefill_chunk_size": max(2, len(ids) // 3), "max_new_tokens": 1, "use_cache": True}
    prepared = compat.prepare(patient.model, inputs, mask, **options)
    return difference(Stepper(patient.model, prepared).prefill().logits[0, -1].double().cpu(), truth[-1])


def _fork(patient: Patient) -> float:
    ids, tails = patient.rows[0], [own[:NEW] for own in patient.rows[1:]]
    loop = patient.paged()
    loop.extend(loop.open(ids), ids)
    loop.cache.fork([0] * len(tails))
    found = [loop.extend(row, tail, 1) for row, tail in enumerate(tails)]
    return worst(
        [
            (own, patient.forward([[*ids, *tail]], use_cache=False)[0, len(ids) :])
            for own, tail in zip(found, tails, strict=True)
        ]
    )


def _rollback(patient: Patient) -> float:
    ids, draft = patient.rows[0], patient.rows[2][:NEW]
    loop = patient.paged()
    loop.cache.activate_past_recording()
    loop.extend(loop.open(ids[:-NEW]), ids[:-NEW])
    loop.cache.rollback([0])
    loop.extend(0, draft)
    kept = [*ids[:-NEW], *draft[:2]]
    [again] = loop.cache.rollback([len(draft) - 2])
    if again:
        loop.extend(0, kept[len(kept) - again :])
    found = loop.extend(0, ids[-NEW:])
    return difference(found, patient.forward([[*kept, *ids[-NEW:]]], use_cache=False)[0, len(kept) :])


def _quantized(kind: str, patient: Patient) -> float:
    """Mean divergence of the next tokens' distributions from those of full precision, over blocks as they are by default."""
    ids = [token for row in patient.rows for token in row]
    loop = patient.paged(block_size=16, quantization=kind)
    found = loop.extend(loop.open(ids), ids, 16).log_softmax(-1)
    truth = patient.forward([ids], use_cache=False)[0].log_softmax(-1)
    return float((truth.exp() * (truth - found)).nan_to_num(math.inf).sum(-1).mean())


def _round_trip(patient: Patient) -> float:
    tokenizer, wrong = patient.tokenizer, 0
    for text in HARD_TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        tracker = TextTracker(tokenizer)
        pieces = [*map(tracker.push, ids), tracker.finish()]
        wrong += tokenizer.decode(ids, skip_special_tokens=True) != text or "".join(pieces) != text
    return float(wrong)


def _speculation(patient: Patient) -> float:
    options = {"raw": True, "max_new_tokens": 16, "do_sample": False}
    plain, found = (
        Decoder(load_recipe({**recipe, "cache": {"kind": "paged"}})).run(
            patient.model, patient.tokenizer, list(TEXTS), **options
        )
        for recipe in ({}, {"drafter": {"kind": "ngram", "schedule": "constant"}})
    )
    widest = 0.0
    for text, own, other in zip(TEXTS, plain, found, strict=True):
        pairs = zip(own.token_ids, other.token_ids, strict=False)
        same = next((place for place, (one, two) in enumerate(pairs) if one != two), None)
        if same is not None:
            ids = [*patient.tokenizer(text).input_ids, *own.token_ids[:same]]
            logits = patient.forward([ids], use_cache=False)[0, -1]
            gap = (logits[own.token_ids[same]] - logits[other.token_ids[same]]).abs() / logits.abs().max()
            widest = max(widest, float(gap))
    return widest


def _batch(patient: Patient, model: Any) -> tuple[float, int]:
    """The largest difference between a row beside others and alone, and how many tokens flip although they are clear."""
    length = min(len(ids) for ids in patient.rows if len(ids) > NEW)
    rows = [ids[:length] for ids in patient.rows if len(ids) > NEW] * 3
    own = copy.copy(patient)
    own.model = model
    together = own.forward(rows, use_cache=False)
    largest, flips = 0.0, 0
    for found, ids in zip(together, rows[: len(rows) // 3], strict=False):
        alone = own.forward([ids], use_cache=False)[0]
        largest = max(largest, difference(found, alone))
        best, error = alone.topk(2).values, (found - alone).abs().amax(-1)
        flips += int(((found.argmax(-1) != alone.argmax(-1)) & (best[:, 0] - best[:, 1] >= 4 * error)).sum())
    return largest, flips


def _accepted(model: Any, **inputs: Any) -> dict[str, Any]:
    """Those that the model's forward has a name for."""
    named = inputs_of(model)
    return {name: value for name, value in inputs.items() if name in named}


Measure = Callable[[Patient], float]
LAWS: Mapping[str, tuple[Measure, str, str]] = {
    "cached = uncached": (_cached, "", "use_cache: true; give generation: {use_cache: false}"),
    "cached in blocks = uncached": (_in_blocks, "", "cache: paged and all that needs it; give cache: dynamic"),
    "left padding changes nothing": (
        _left_padding,
        "",
        "batches with cache: dynamic; use cache: paged, or one prompt a call",
    ),
    "0 in a mask hides a token": (_mask_polarity, "", "attention masks: padded batches under generate"),
    "a mask covers cached and new tokens": (_mask_length, "", "a cache of your own from call to call, with a mask"),
    "prefill in chunks = at once": (
        _chunked,
        "",
        "prefill_chunk_size, and prompt lookup or assistants of transformers; decodekit's drafters are not concerned",
    ),
    "prefill in chunks, in blocks": (lambda patient: _in_blocks(patient, 5), "", "prompts on a filled cache: paged"),
    "forks go their own way": (_fork, "", "beams, candidates and num_return_sequences over cache: paged"),
    "rollback = never forwarded": (_rollback, "", "drafters and constraints over cache: paged"),
    "tokens give the text back": (_round_trip, "texts", "stop_strings, constraints and streams of such texts"),
    "speculation = plain decoding": (_speculation, "largest margin of a flip", "drafters"),
    **{
        f"K/V as {kind} = full precision": (partial(_quantized, kind), DIVERGENCE, f"cache: {{quantization: {kind}}}")
        for kind in ("int8", "fp8", "int4")
    },
}
"""A law: what measures it, what the number is of if not of logits, what not to use where it fails."""


@torch.no_grad()
def examine(model: Any, tokenizer: Any) -> Iterator[Finding]:
    """Measure every law, one after the other.

    Args:
        model: a causal language model, in evaluation mode.
        tokenizer: its tokenizer.

    Raises:
        Refused: decodekit does not decode this model at all.
    """
    compat.check_model(model)
    patient = Patient(model, tokenizer)
    for law, (measure, unit, avoid) in LAWS.items():
        limit = LIMITS_BY_UNIT.get(unit, patient.limit)
        yield _finding(law, partial(measure, patient), limit, unit, avoid)
    count = sum(weight.numel() for weight in model.parameters())
    others = (dtype for dtype in LIMITS if count * dtype.itemsize <= _LARGEST_COPY)
    for dtype in dict.fromkeys([model.dtype, *others]):
        yield _batch_finding(patient, dtype)


def _finding(law: str, measure: Callable[[], float], limit: float, unit: str, avoid: str) -> Finding:
    try:
        value = measure()
    except Refused as error:
        return Finding(law, "refused", math.inf, limit, str(error))
    except Exception as error:
        return Finding(law, "fails", math.inf, limit, f"{type(error).__name__}: {error}", avoid)
    return (
        Finding(law, "holds", value, limit, unit)
        if value <= limit
        else Finding(law, "fails", value, limit, unit, avoid)
    )


def _batch_finding(patient: Patient, dtype: torch.dtype) -> Finding:
    name = str(dtype).removeprefix("torch.")
    model = patient.model if dtype == patient.model.dtype else copy.deepcopy(patient.model).to(dtype)
    limit = LIMITS.get(dtype, LIMITS[torch.bfloat16])
    try:
        largest, flips = _batch(patient, model)
    except RuntimeError as error:
        if model is patient.model:
            raise
        # Not every operation is there for every dtype.
        return Finding(f"a batch = its rows alone, {name}", "refused", math.inf, limit, str(error).splitlines()[0])
    holds = largest <= limit and not flips
    avoid = "" if holds else f"batches in {name} where every token counts; decode one prompt a call"
    return Finding(
        f"a batch = its rows alone, {name}",
        "holds" if holds else "fails",
        largest,
        limit,
        f"{flips} clear tokens flip",
        avoid,
    )
