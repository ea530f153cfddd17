"""What a captured step is made of: the forward of some rows, then score, rules and pick, launched and read in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decodekit.cache.runs import Frame, Run, bucket
from decodekit.core.random import TOKEN_LANE
from decodekit.core.types import BranchOutputs, Outputs, Rows
from decodekit.kernels.paged_attention import WorkShape
from decodekit.runtime.capture import GraphStats, capture, captures, fingerprint, from_elsewhere
from decodekit.runtime.paged_session import PagedSession
from decodekit.runtime.pipeline import Pipeline
from decodekit.runtime.scoring import Scoring
from decodekit.runtime.sequence import SequenceState

STEPS = 256
"""Most steps of a run: what is planned at once."""

AHEAD = 2
"""Steps that are launched before the tokens of the first are read."""


class Device:
    """The GPU's side of a run: steps are launched, and read in the same order."""

    def __init__(self, forwards: Sequence[Forward], pick: Pick) -> None:
        self._forwards, self._pick = forwards, pick
        self.where = pick.read.device
        self.launched = 0
        self._ring: list[tuple[Tensor, Any]] = []

    @torch.no_grad()
    def launch(self) -> None:
        """Begin another step."""
        for forward in self._forwards:
            forward.launch()
        self._pick.launch()
        given, event = self._pick.read, None
        if given.is_cuda:
            place = self.launched % (AHEAD + 1)
            if place == len(self._ring):
                self._ring.append((torch.empty(given.shape, dtype=given.dtype, pin_memory=True), torch.cuda.Event()))
            copy, event = self._ring[place]
            copy.copy_(given, non_blocking=True)
            event.record()
        else:
            self._ring.append((given.clone(), None))
        self.launched += 1

    def read(self, number: int) -> list[list[float]]:
        """Tokens, whether they are none, and log-probabilities of a step, [R] each."""
        copy, event = self._ring[number % (AHEAD + 1) if self.where.type == "cuda" else number]
        if event is not None:
            event.synchronize()
        result: list[list[float]] = copy.tolist()
        return result


class Pick:
    """Score, rules and pick of R rows over outputs that stay where they are.

    Attributes:
        read: [3, R] float64: the tokens, whether they are none, and their log-probabilities.
    """

    def __init__(
        self,
        scorer: Scoring,
        pipeline: Pipeline,
        outputs: Callable[[], Outputs],
        frames: Sequence[Frame],
        sequences: Sequence[SequenceState],
        *,
        logprobs: bool,
    ) -> None:
        self._scorer, self._pipeline, self._outputs, self._frames = scorer, pipeline, outputs, frames
        self._logprobs = logprobs
        device, rows = frames[0].tokens.device, len(sequences)
        # Without rules nobody looks at the tokens so far.
        width = max(len(own.request.prompt_ids) + own.limits.max_new_tokens for own in sequences)
        self._width = width + STEPS if pipeline.steps else 0
        with torch.inference_mode(False):
            self._tokens = torch.zeros(rows, self._width, dtype=torch.int64, device=device)
            self._lengths = torch.zeros(rows, dtype=torch.int64, device=device)
            prompts = [len(own.request.prompt_ids) for own in sequences]
            streams = [own.request.stream for own in sequences]
            self._rows = Rows(
                tokens=self._tokens,
                lengths=self._lengths,
                prompt_lengths=torch.tensor(prompts, device=device),
                requests=[own.request.id for own in sequences],
                streams=streams,
                eos=pipeline.eos,
            )
            self._seeds = torch.tensor([_signed(stream.seed, 64) for stream in streams], device=device)
            # The first number is the position, from 0 on.
            counters = [[0, TOKEN_LANE, _signed(s.sample, 32), _signed(s.digest, 32)] for s in streams]
            self._counters = torch.tensor(counters, dtype=torch.int32, device=device)
            self.read = torch.zeros(3, rows, dtype=torch.float64, device=device)
        self.graph: Any = None
        self.captures = captures(device)

    def load(self, sequences: Sequence[SequenceState]) -> None:
        """The rows have so many tokens now."""
        histories = [[*own.request.prompt_ids, *own.tokens] for own in sequences]
        self._lengths.copy_(torch.tensor([len(own) for own in histories]))
        self._counters[:, 0] = torch.tensor([len(own.tokens) for own in sequences])
        if self._width:
            filled = torch.zeros(self._tokens.shape, dtype=torch.int64)
            for row, history in enumerate(histories):
                filled[row, : len(history)] = torch.tensor(history)
            self._tokens.copy_(filled)

    def launch(self) -> None:
        """Pick a token of each row, and feed it."""
        if self.graph is None:
            self()
        else:
            self.graph.replay()

    @torch.no_grad()
    def __call__(self) -> None:
        """What a graph holds."""
        scores = self._scorer(self._outputs())
        logprobs = self.read[2] if self._logprobs else None
        tokens, broken = self._pipeline.pick_blindly(self._rows, scores, self._seeds, self._counters, logprobs)
        self.read[0], self.read[1] = tokens, broken
        for frame in self._frames:
            # Every branch is fed the same token.
            frame.tokens[: frame.used].view(-1, len(tokens)).copy_(tokens)
        if self._width:
            self._tokens.scatter_(1, self._lengths.unsqueeze(1), tokens.unsqueeze(1))
        self._lengths.add_(1)
        self._counters[:, 0].add_(1)


class Forward:
    """A captured forward of some rows of a session's cache."""

    def __init__(self, session: PagedSession, frame: Frame) -> None:
        self.frame = frame
        self._outputs: BranchOutputs | None = None
        self._session = session
        self._graph: Any = None

    @property
    def outputs(self) -> BranchOutputs:
        """Of all its rows, overwritten by every step."""
        assert self._outputs is not None, "nothing was forwarded"
        return self._outputs

    def load(self, run: Run) -> None:
        """Begin the steps of a run."""
        self.frame.load(run)

    @torch.no_grad()
    def __call__(self) -> None:
        """What a graph holds."""
        self._outputs = self._session.framed(self.frame)

    def capture(self, stats: GraphStats) -> None:
        """Put it into a graph."""
        self._graph = capture(self, stats)

    def launch(self) -> None:
        """Forward the tokens that the frame holds."""
        if self._graph is None:
            self()
        else:
            self._graph.replay()


def forward_of(session: PagedSession, run: Run, most: int, stats: GraphStats) -> Forward:
    """A forward that serves a run, captured where graphs are.

    Args:
        session: whose rows they are.
        run: the run.
        most: tokens that its longest row may get to have.
        stats: is told of captures.
    """
    cache, rows = session.cache, bucket(len(run.rows), session.cache.device)
    # Where modules may change what they compute, every session has forwards of its own.
    model = fingerprint(session.model), id(session) if from_elsewhere(session.model) else None
    for stale in [other for other in cache.captured if other[0] != model]:
        del cache.captured[stale]
    key = model, session.layers, rows
    shapes = [WorkShape.of(plan) for plan in run.plan(rows)]
    for forward in cache.captured.get(key, ()):
        if all(mine.holds(its) for mine, its in zip(forward.frame.shapes, shapes, strict=True)):
            return forward
    now = max(row.length for row in run.rows) + run.steps
    most = max(now, most)
    blocks = [-(-most // group.pool.block_size) for group in cache.groups]
    growth = min(2.0, most / now)
    roomy = [shape.roomy(count, growth) for shape, count in zip(shapes, blocks, strict=True)]
    forward = Forward(session, Frame(cache, rows, roomy))
    if captures(cache.device):
        forward.load(run)
        forward.capture(stats)
        # Only a replay fills it: what lies there may be anything.
        forward.outputs.blank()
    stats.forward_captures += 1
    cache.captured.setdefault(key, []).append(forward)
    return forward


def _signed(number: int, bits: int) -> int:
    """The same bits as a signed number."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number
