"""The values that flow between the loop, strategies and rules.

A *sequence* owns cache (a request, a sample, a beam); a *position* is one row of logits. Strategies, rules and constraints
see positions only, so that several draft tokens of one sequence can be scored at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import torch
from torch import Tensor

from decodekit.core.errors import InputError
from decodekit.core.random import Stream, uniform

FinishReason = Literal["eos", "stop", "length", "time", "constraint", "cancelled", "error"]
Scope = Literal["prompt", "output", "both"]


class Need(StrEnum):
    """What a plugin must be given beyond logits."""

    TOKENIZER = "tokenizer"
    TEXT = "text"
    CONTEXT = "context"
    NEGATIVE_PROMPT = "negative_prompt"
    HIDDEN_STATES = "hidden_states"


@dataclass(frozen=True)
class Request:
    """One row of work: a prompt and everything that belongs to it alone.

    Attributes:
        id: the row of the call.
        prompt: which of the given prompts it is; several rows may be samples of one.
        prompt_ids: token ids without pads.
        stream: its random stream.
        inputs: what the caller gave beside the ids (text, context, negative_prompt, ...).
        encode: prompt text to ids as this model expects them (chat template unless raw); ``None`` without a tokenizer.
        tokenizer: the model's tokenizer, or ``None``.
    """

    id: int
    prompt_ids: tuple[int, ...]
    stream: Stream
    prompt: int = 0
    inputs: Mapping[str, Any] = field(default_factory=dict)
    encode: Callable[[str], list[int]] | None = None
    tokenizer: Any = None

    def require(self, name: Need | str, used_by: str) -> Any:
        """The input called ``name``.

        Raises:
            InputError: it was not given; says which parameter is missing.
        """
        if (value := self.inputs.get(str(name))) is None:
            raise InputError(
                f"{used_by} needs {str(name)!r} for prompt {self.prompt}; give it as dk_inputs=[{{{str(name)!r}: ...}}, ...], "
                f"one dict a prompt (got {sorted(self.inputs) or 'none'})"
            )
        return value

    def encoded(self, text: str, used_by: str) -> tuple[int, ...]:
        """``text`` as prompt ids.

        Raises:
            InputError: no tokenizer was given.
        """
        if self.encode is None:
            raise self._no_tokenizer(used_by)
        return tuple(self.encode(text))

    def prompt_of(self, value: Any, name: str, used_by: str) -> tuple[int, ...]:
        """The ids of an input that is a prompt of its own, given as text or as token ids.

        Raises:
            InputError: it is empty or neither, or a text without a tokenizer.
        """
        check_ids_or_text(value, name, used_by, self.prompt)
        return self.encoded(value, used_by) if isinstance(value, str) else tuple(value)

    def without(self, part: Any, used_by: str) -> tuple[int, ...] | None:
        """The ids of the prompt with the first occurrence of a text, or of a run of ids, cut out.

        A text is cut out of what the ids decode to, special tokens included, with the white space that follows it, so that
        a chat template around it stays. ``None`` where the prompt does not hold it.

        Raises:
            InputError: it is a text and there is no tokenizer.
        """
        if not isinstance(part, str):
            ids, length = tuple(part), len(part)
            starts = range(len(self.prompt_ids) - length + 1)
            start = next((start for start in starts if self.prompt_ids[start : start + length] == ids), None)
            return None if start is None else self.prompt_ids[:start] + self.prompt_ids[start + length :]
        if self.tokenizer is None:
            raise self._no_tokenizer(used_by)
        before, found, after = self.tokenizer.decode(self.prompt_ids).partition(part)
        if not found:
            return None
        if not before[-1:].isalnum():
            after = after.lstrip()
        return tuple(self.tokenizer(before + after, add_special_tokens=False).input_ids)

    def _no_tokenizer(self, used_by: str) -> InputError:
        return InputError(f"{used_by} needs a tokenizer; give dk_tokenizer=tokenizer or decoder.bind(tokenizer=...)")


def check_ids_or_text(value: Any, name: str, used_by: str, prompt: int) -> None:
    """Refuse an input that is neither a text with at least one word nor a list of token ids.

    Raises:
        InputError: says which prompt's it is.
    """
    whose = f"{used_by}: the {name} of prompt {prompt}"
    if isinstance(value, str):
        if not value.strip():
            raise InputError(f"{whose} is empty; give at least one word")
    elif not isinstance(value, Sequence) or not value or not all(type(item) is int for item in value):
        raise InputError(f"{whose} should be a text or a list of token ids, got {value!r}"[:300])


@dataclass(frozen=True)
class Branch:
    """A stream of tokens with a cache of its own that a sequence needs; every branch is fed the same chosen token.

    Attributes:
        name: how ``score`` finds its outputs.
        prompt_ids: its prompt, without pads.
        model: the name of the model that runs it; ``main`` is the one being decoded.
    """

    name: str
    prompt_ids: tuple[int, ...]
    model: str = "main"


class BranchOutputs:
    """What one forward of one branch gave at every position.

    Attributes:
        layers: the hidden layers that were kept, in the order the strategy named them.
    """

    def __init__(
        self,
        logits: Tensor | None,
        hidden: Mapping[int, Tensor] | None = None,
        readout: Callable[..., Tensor] | None = None,
    ) -> None:
        self._logits = logits
        self.layers = tuple(hidden or ())
        self._hidden = hidden or {}
        self._readout = readout

    @property
    def logits(self) -> Tensor:
        """[P, V], at least float32; shared, never to be edited."""
        if self._logits is None:
            raise TypeError("these outputs have no logits")
        return self._logits

    def hidden(self, layer: int) -> Tensor:
        """[P, H]: the residual stream after ``layer`` decoder layers; 0 is the embedding.

        Only layers named by the strategy's ``hidden_layers`` are kept.
        """
        return self._hidden[layer]

    def select(self, index: Tensor) -> BranchOutputs:
        """The given positions, [P'] int64, in this order."""
        return self._each(lambda own: own[index])

    def span(self, start: int, stop: int) -> BranchOutputs:
        """Positions ``start`` up to ``stop``, without a copy."""
        if (start, stop) == (0, len(self.logits)):
            return self
        return self._each(lambda own: own[start:stop])

    def only(self, layers: Sequence[int]) -> BranchOutputs:
        """The same positions with these hidden layers alone."""
        return BranchOutputs(self.logits, {layer: self._hidden[layer] for layer in layers}, self._readout)

    @staticmethod
    def concatenate(parts: Sequence[BranchOutputs]) -> BranchOutputs:
        """The positions of several outputs of one model, in order."""
        first = parts[0]
        if len(parts) == 1:
            return first
        hidden = {layer: torch.cat([part.hidden(layer) for part in parts]) for layer in first.layers}
        return BranchOutputs(torch.cat([part.logits for part in parts]), hidden, first._readout)

    def readout(self, hidden: Tensor, *, norm: bool = False, finish: bool = True) -> Tensor:
        """Project hidden states onto the vocabulary as the model's own head does.

        Args:
            hidden: [..., H].
            norm: apply the model's final norm first.
            finish: apply the model's logit scale and softcap.

        Returns:
            [..., V], at least float32.
        """
        if self._readout is None:
            raise InputError("this branch has no output head to read hidden states with")
        return self._readout(hidden, norm=norm, finish=finish)

    def early(self, *, norm: bool = False, finish: bool = True) -> Tensor:
        """[C, P, V]: what all kept layers say, as :meth:`readout` does it.

        Ask for it before ``logits``: where these are still to be computed, the head is then read once for both.
        """
        return self.readout(torch.stack([self.hidden(layer) for layer in self.layers]), norm=norm, finish=finish)

    def blank(self) -> None:
        """Put zeros where memory that was never written may hold anything."""
        self.logits.zero_()

    def _each(self, part: Callable[[Tensor], Tensor]) -> BranchOutputs:
        return BranchOutputs(
            part(self.logits), {layer: part(own) for layer, own in self._hidden.items()}, self._readout
        )


class Outputs(Mapping[str, BranchOutputs]):
    """The outputs of every branch, by name, over the same positions."""

    def __init__(self, branches: Mapping[str, BranchOutputs]) -> None:
        self._branches = dict(branches)
        self.annotations: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> BranchOutputs:
        return self._branches[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._branches)

    def __len__(self) -> int:
        return len(self._branches)

    def annotate(self, **values: Tensor) -> None:
        """Attach a [P] tensor a name to these positions; the trace carries it (``premature_layer=...``)."""
        self.annotations.update(values)


@dataclass(frozen=True)
class Rows:
    """What a rule knows about each position.

    Attributes:
        tokens: [P, L] int64; position p's history (prompt, then output, no pads) fills columns ``0 .. lengths[p] - 1``; what
            lies beyond is a valid id but means nothing.
        lengths: [P] int64, tokens so far.
        prompt_lengths: [P] int64.
        requests: [P] which request each position belongs to.
        streams: [P] random streams.
        eos: ids that end a sequence.
        states: [P] this rule's own state at each position (what ``init_state`` and ``commit`` returned).
        lane: first random lane of this rule.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    requests: Sequence[int]
    streams: Sequence[Stream]
    eos: tuple[int, ...] = ()
    states: Sequence[Any] = ()
    lane: int = 1

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def positions(self) -> Tensor:
        """[P] index of the token being chosen; 0 is the first of the output."""
        return self.lengths - self.prompt_lengths

    def within(self, scope: Scope) -> Tensor:
        """[P, L] bool: the columns of ``tokens`` that lie in the prompt, the output, or either."""
        column = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        prompt, length = self.prompt_lengths.unsqueeze(-1), self.lengths.unsqueeze(-1)
        if scope == "prompt":
            return column < prompt
        return (column < length) & (column >= prompt) if scope == "output" else column < length

    def occurrences(self, vocab_size: int, scope: Scope) -> tuple[Tensor, Tensor]:
        """[P, L] int64 ids below ``vocab_size``, and [P, L] bool: where one of them stands in the scope.

        A prompt may hold ids that the logits do not reach (a tokenizer larger than the head): they stand nowhere.
        """
        return self.tokens.clamp(max=vocab_size - 1), self.within(scope) & (self.tokens < vocab_size)

    def counts(self, vocab_size: int, scope: Scope) -> Tensor:
        """[P, V] float32: how often each token stands in the scope of each position."""
        ids, counted = self.occurrences(vocab_size, scope)
        counts = torch.zeros(len(self), vocab_size, device=self.tokens.device)
        return counts.scatter_add_(1, ids, counted.to(counts.dtype))

    def tail(self, count: int) -> Tensor:
        """[P, count] int64: the last tokens of each history; -1, which equals no token, where it is shorter."""
        column = self.lengths.unsqueeze(-1) - count + torch.arange(count, device=self.tokens.device)
        return self.tokens.gather(1, column.clamp(min=0)).masked_fill(column < 0, -1)

    def random(self, lane: int = 0) -> Tensor:
        """[P] uniforms in [0, 1) of this rule; a row's draw never depends on its neighbours."""
        return draw(self.streams, self.positions, self.lane + lane)


def draw(streams: Sequence[Stream], positions: Tensor, lane: int) -> Tensor:
    """[P] float32 uniforms, one a position."""
    values = [uniform(stream, position, lane) for stream, position in zip(streams, positions.tolist(), strict=True)]
    return torch.tensor(values, dtype=torch.float32, device=positions.device)


@dataclass
class Output:
    """What became of one prompt (or of one of its samples).

    Attributes:
        text: the text of the output, cut before a stop string.
        token_ids: the output without the prompt; an ending EOS and the tokens of a stop string are part of it.
        finish_reason: why it ended.
        logprobs: a token: its log-probability (nats) under the decoder's distribution.
        candidates: what a sequence-level strategy chose from.
        stats: counts and seconds (``target_forwards``, ``forwarded_tokens``, ``ttft_s``, ``tokens_per_s``, ...).
        error: one line, when ``finish_reason`` is ``error``.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[float] = field(default_factory=list)
    candidates: list[Any] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
