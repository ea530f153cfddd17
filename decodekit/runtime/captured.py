"""Captured steps: the forward of some rows, then score, rules and pick, launched and read in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decodekit.cache.runs import Frame
from decodekit.core.random import TOKEN_LANE
from decodekit.core.types import Outputs, Rows
from decodekit.runtime.capture import captures
from decodekit.runtime.constraining import constrain_blindly
from decodekit.runtime.forwards import RunForward
from decodekit.runtime.pipeline import Pipeline
from decodekit.runtime.scoring import Scoring
from decodekit.runtime.sequence import SequenceState

STEPS = 256
"""Most steps that are planned at once."""

AHEAD = 2
"""Steps that are launched before the tokens of the first are read."""


class Device:
    """The GPU's side of a run: steps are launched, and read in the same order."""

    def __init__(self, forwards: Sequence[RunForward], pick: Pick) -> None:
        self._forwards, self.pick = forwards, pick
        self.where = pick.read.device
        self._forwarded = self._picked = 0
        self._ring: list[tuple[Tensor, Any]] = []

    @property
    def lent(self) -> bool:
        """Whether forwards of more rows serve, until others are captured."""
        return any(forward.lent for forward in self._forwards)

    def extend(self, steps: int) -> bool:
        """Plan more steps, once the forwards of all before were begun; whether what is captured has room for them.

        Raises:
            OutOfBlocks: there are no blocks for them.
        """
        return all(forward.extend(steps) for forward in self._forwards)

    def launch(self, steps: int) -> None:
        """Begin steps until so many were begun in all."""
        while self._picked < steps:
            self.launch_forwards(self._picked + 1)
            self.launch_pick()

    @torch.no_grad()
    def launch_forwards(self, steps: int) -> None:
        """Begin to forward what was picked last, unless so many forwards were begun."""
        if self._forwarded < steps:
            for forward in self._forwards:
                forward.launch()
            self._forwarded += 1

    @torch.no_grad()
    def launch_pick(self) -> None:
        """Begin to pick from what is forwarded."""
        self.pick.launch()
        given, event = self.pick.read, None
        if given.is_cuda:
            place = self._picked % (AHEAD + 1)
            if place == len(self._ring):
                self._ring.append((torch.empty(given.shape, dtype=given.dtype, pin_memory=True), torch.cuda.Event()))
            copy, event = self._ring[place]
            copy.copy_(given, non_blocking=True)
            event.record()
        else:
            self._ring.append((given.clone(), None))
        self._picked += 1

    def read(self, number: int) -> list[list[float]]:
        """Tokens, whether they are none, and log-probabilities of a step; rows that are filled up with come last."""
        copy, event = self._ring[number % (AHEAD + 1) if self.where.type == "cuda" else number]
        if event is not None:
            event.synchronize()
        result: list[list[float]] = copy.tolist()
        return result


class Pick:
    """Score, constraints, rules and pick of R rows over outputs that stay where they are.

    Args:
        scorer: from outputs to scores.
        pipeline: rules and pick.
        outputs: gives the branches' outputs, R positions each.
        frames: what is fed the tokens, with the rows of every branch after each other.
        rows: R.
        width: most tokens of a row; 0 where no rule looks at them.
        logprobs: note the tokens' log-probabilities.
        words: of a mask over the logits, see :meth:`constrain`; 0 where all tokens may come.

    Attributes:
        read: [3, R] float64: the tokens, whether they are none, and their log-probabilities.
        graph: what was captured of it.
        constants: what that reads beside what lies here.
        captures: whether it is to be captured.
    """

    def __init__(
        self,
        scorer: Scoring,
        pipeline: Pipeline,
        outputs: Callable[[], Outputs],
        frames: Sequence[Frame],
        *,
        rows: int,
        width: int,
        logprobs: bool,
        words: int,
    ) -> None:
        self._scorer, self._pipeline, self._outputs, self._frames = scorer, pipeline, outputs, frames
        self._logprobs, self._width = logprobs, width
        device = frames[0].tokens.device
        with torch.inference_mode(False):
            self._tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
            self._lengths, self._prompts, self._seeds = torch.zeros(3, rows, dtype=torch.int64, device=device)
            self._counters = torch.zeros(rows, 4, dtype=torch.int32, device=device)
            self.read = torch.zeros(3, rows, dtype=torch.float64, device=device)
            others: dict[str, Any] = {"requests": _Unknown(), "streams": _Unknown()}
            self._rows = Rows(self._tokens, self._lengths, self._prompts, **others, eos=pipeline.eos)
            self._words = torch.full((rows, words), -1, dtype=torch.int32, device=device)
            self._staged = torch.full((rows, words), -1, dtype=torch.int32, pin_memory=self._words.is_cuda)
        self.graph: Any = None
        self.constants = list[Tensor]()
        self.captures = captures(device)

    def load(self, sequences: Sequence[SequenceState]) -> None:
        """Begin with these rows, at most R, which have so many tokens now."""
        streams = [own.request.stream for own in sequences]
        own = slice(len(sequences))
        self._lengths.zero_()
        lengths = [len(known.request.prompt_ids) + len(known.tokens) for known in sequences]
        self._lengths[own] = torch.tensor(lengths).to(self._lengths)
        self._prompts[own] = torch.tensor([len(known.request.prompt_ids) for known in sequences]).to(self._prompts)
        self._seeds[own] = torch.tensor([_signed(stream.seed, 64) for stream in streams]).to(self._seeds)
        counters = [
            [len(known.tokens), TOKEN_LANE, _signed(stream.sample, 32), _signed(stream.digest, 32)]
            for known, stream in zip(sequences, streams, strict=True)
        ]
        self._counters[own] = torch.tensor(counters, dtype=torch.int32).to(self._counters)
        if self._width:
            filled = torch.zeros(self._tokens.shape, dtype=torch.int64)
            for row, known in enumerate(sequences):
                filled[row, : lengths[row]] = torch.tensor([*known.request.prompt_ids, *known.tokens])
            self._tokens.copy_(filled)
        self._words.fill_(-1)

    def constrain(self, masks: Sequence[Tensor | None]) -> None:
        """Tell which tokens may come next, before each launch.

        Args:
            masks: of each row, [ceil(V / 32)] int32 on the host; ``None``: all may.
        """
        for row, mask in enumerate(masks):
            if mask is None:
                self._staged[row].fill_(-1)
            else:
                self._staged[row].copy_(mask)
        self._words.copy_(self._staged, non_blocking=True)

    def launch(self) -> None:
        """Pick a token of each row, and feed it."""
        if self.graph is None:
            self()
        else:
            self.graph.replay()

    @torch.no_grad()
    def __call__(self) -> None:
        """What a graph holds."""
        outputs = self._outputs()
        scores = self._scorer(outputs)
        if self._words.shape[1]:
            scores = constrain_blindly(scores, outputs["main"].logits, self._words)
        logprobs = self.read[2] if self._logprobs else None
        tokens, broken = self._pipeline.pick_blindly(self._rows, scores, self._seeds, self._counters, logprobs)
        self.read[0], self.read[1] = tokens, broken
        for frame in self._frames:
            # Every branch is fed the same token.
            rows = max(frame.used, len(tokens))
            frame.tokens[:rows].view(-1, len(tokens)).copy_(tokens)
        if self._width:
            self._tokens.scatter_(1, self._lengths.unsqueeze(1), tokens.unsqueeze(1))
        self._lengths.add_(1)
        self._counters[:, 0].add_(1)


_NOT_KNOWN = "a rule reads requests or streams, which a captured step does not know"


class _Unknown(Sequence[Any]):
    """What is another thing at every load, so that a rule which asks for it cannot be captured."""

    def __getitem__(self, place: Any) -> Any:
        raise RuntimeError(_NOT_KNOWN)

    def __len__(self) -> int:
        raise RuntimeError(_NOT_KNOWN)


def _signed(number: int, bits: int) -> int:
    """The same bits as a signed number."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number
