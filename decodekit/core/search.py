"""What a search strategy sees of its hypotheses after a forward, and what it answers.

A *group* is all live hypotheses of one prompt. Each is a sequence with cache of its own; forking one copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from decodekit.core.types import FinishReason, Outputs, Request


@dataclass(frozen=True)
class Hypothesis:
    """One live hypothesis.

    Attributes:
        tokens: its output so far, without the prompt.
        logprobs: of each of its tokens, nats, under the distribution that it was chosen from (after all rules).
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class Group:
    """The hypotheses of one prompt after a forward of their last tokens.

    Attributes:
        request: the prompt.
        hypotheses: [R] what lives; one without tokens at first.
        logits: [R, V] of the next token, after the inner strategy and all rules.
        outputs: what the model gave at these R positions.
        prompt_hidden: a hidden layer, its [T, H] states over the prompt; empty unless the strategy reads them.
        max_new_tokens: most tokens of output.
        eos: ids that end an output.
        ends: ``(parent, token)`` to why the hypothesis would be over with this token; ``None`` while it would go on.
        sample: whether continuations are to be drawn.
        draw: ``lane`` to a uniform in [0, 1) of this prompt and step.
        state: what the last ``step`` left in its ``Advance``; ``None`` at first.
    """

    request: Request
    hypotheses: Sequence[Hypothesis]
    logits: Tensor
    outputs: Outputs
    max_new_tokens: int
    eos: tuple[int, ...]
    ends: Callable[[int, int], FinishReason | None]
    draw: Callable[[int], float]
    sample: bool = False
    prompt_hidden: Mapping[int, Tensor] = field(default_factory=dict)
    state: Any = None


@dataclass(frozen=True)
class Ended:
    """A hypothesis that is over and stands for an output.

    Attributes:
        parent: the row of the group that it is.
        token: its last token; ``None`` when it ends as it stands.
        score: higher is better; outputs are ranked by it.
        reason: why it is over.
    """

    parent: int
    token: int | None
    score: float
    reason: FinishReason


@dataclass(frozen=True)
class Advance:
    """The next group.

    Attributes:
        parents: [R'] rows of the group that live on, in any order, with repeats; none ends the search.
        tokens: [R'] the token that each is fed.
        ended: hypotheses that are over.
        state: handed back with the next group; a value, never changed in place.
    """

    parents: Sequence[int] = ()
    tokens: Sequence[int] = ()
    ended: Sequence[Ended] = ()
    state: Any = None
