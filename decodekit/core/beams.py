"""What the beam strategies share: the best continuations of several hypotheses, and when no better output can come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from decodekit.core.random import inverse_cdf

EarlyStopping = bool | Literal["never"]


class Continuation(NamedTuple):
    """A hypothesis with one more token: the sum of its log-probabilities, its row, and the token."""

    score: float
    parent: int
    token: int


def log_probabilities(logits: Tensor) -> Tensor:
    """[R, V] of the next token of each hypothesis; one that failed has no legal token, and no continuation."""
    dead = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.log_softmax(-1).masked_fill(dead, -torch.inf)


def most_likely(scores: Tensor, count: int) -> list[Continuation]:
    """The ``count`` best of [R, V] accumulated log-probabilities, the best first; none that is impossible."""
    values, places = scores.flatten().topk(min(count, scores.numel()))
    return _continuations(values, places, scores.shape[1])


def drawn(scores: Tensor, count: int, draw: Callable[[int], float]) -> list[Continuation]:
    """``count`` draws without replacement from [R, V] accumulated log-probabilities, the best first.

    Args:
        scores: nats; they need not sum to one.
        count: how many.
        draw: a number from 0 to ``count - 1`` to a uniform in [0, 1).
    """
    flat = scores.flatten()
    left = flat.double().softmax(-1)
    count = min(count, int((left > 0).sum()))
    if not count:
        return []
    places = []
    for number in range(count):
        place = inverse_cdf(left.unsqueeze(0), torch.tensor([draw(number)], device=left.device))
        places.append(place)
        left = left.index_fill(0, place, 0.0)
    chosen = torch.cat(places)
    order = flat[chosen].argsort(descending=True, stable=True)
    return _continuations(flat[chosen][order], chosen[order], scores.shape[1])


def _continuations(values: Tensor, places: Tensor, vocab: int) -> list[Continuation]:
    pairs = zip(values.tolist(), places.tolist(), strict=True)
    return [Continuation(score, *divmod(place, vocab)) for score, place in pairs if score != -torch.inf]


def can_improve(
    running: float,
    finished: Sequence[float],
    keep: int,
    *,
    length: int,
    max_length: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> bool:
    """Whether what still runs could come under the best ``keep`` outputs, as transformers' beam search decides it.

    Args:
        running: the best sum of log-probabilities that still runs.
        finished: the scores of what is over.
        keep: how many outputs are kept.
        length: tokens of output so far.
        max_length: most tokens of output.
        length_penalty: the power of the length by which a score is divided.
        early_stopping: ``True``: not once ``keep`` are over; ``False``: judged at the length so far; ``"never"``: judged at the
            length that is best for it.
    """
    if len(finished) < keep:
        return True
    if early_stopping is True:
        return False
    at = max_length if early_stopping == "never" and length_penalty > 0 else length
    return running / at**length_penalty > sorted(finished, reverse=True)[keep - 1]
