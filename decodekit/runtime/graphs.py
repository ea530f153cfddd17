"""Plain steps from CUDA graphs: many in a row, while the host reads the tokens of a step during the next one.

Launched one by one, the operations of a step take the host ten times as long as the GPU. So two graphs are captured: the
forward of a number of rows, which is kept with the cache for later calls, and score, rules and pick, which are a call's own.
What a graph cannot hold (drafts, searches, rules that ask the device, recurrent states) is decoded step by step.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.runs import Frame, Run, bucket, most_steps
from decodekit.core.errors import DecodekitError
from decodekit.core.random import TOKEN_LANE
from decodekit.core.types import BranchOutputs, Outputs, Rows
from decodekit.kernels import triton_runs
from decodekit.kernels.paged_attention import WorkShape
from decodekit.runtime.choosing import StepRecord
from decodekit.runtime.lane import Lane
from decodekit.runtime.paged_session import PagedSession
from decodekit.runtime.pipeline import Pipeline
from decodekit.runtime.scoring import Scoring
from decodekit.runtime.sequence import SequenceState
from decodekit.runtime.session import Session
from decodekit.runtime.tasks import PlainTask, Task

STEPS = 256
"""Most steps of a run: what is planned at once."""

AHEAD = 2
"""Steps that are launched before the tokens of the first are read."""

_LOG = logging.getLogger(__name__)


@dataclass
class GraphStats:
    """What graphs did for a call.

    Attributes:
        steps: that came from graphs.
        forward_captures: forwards that were captured; those of earlier calls are used again.
        pick_captures: captures of score, rules and pick.
        pool_bytes: memory that the captures of this call took.
        eager: why steps are launched one by one; ``None`` where they are not.
    """

    steps: int = 0
    forward_captures: int = 0
    pick_captures: int = 0
    pool_bytes: int = 0
    eager: str | None = None


class Graphs:
    """Takes the steps of a call's rows, as far as graphs can.

    Args:
        sessions: what runs the branches.
        lane: the requests.
        watched: what looks at every step on the host, if anything.
    """

    def __init__(self, sessions: Sequence[Session], lane: Lane, *, watched: str | None) -> None:
        self._sessions = [session for session in sessions if isinstance(session, PagedSession)]
        self._scorer, self._pipeline, self._chooser = lane.scorer, lane.pipeline, lane.chooser
        self._keep_logprobs = lane.chooser.keeps_logprobs
        self._picks: dict[Any, _Pick] = {}
        self.stats = GraphStats(eager=watched or self._why_not(sessions, lane))
        if self.stats.eager is not None and triton_runs(sessions[0].model.device):
            _LOG.info("steps are launched one by one: %s", self.stats.eager)

    def _why_not(self, sessions: Sequence[Session], lane: Lane) -> str | None:
        tasks = lane.tasks
        if lane.speculation is not None:
            return "drafts"
        if len(self._sessions) < len(sessions):
            return "a cache without blocks"
        for session in self._sessions:
            if (reason := session.why_no_run()) is not None:
                return reason
        if other := next((task for task in tasks if not isinstance(task, PlainTask)), None):
            return f"a {type(other).__name__} decides between steps"
        if any(task.root.constraint is not None for task in tasks):
            return "a constraint"
        return self._pipeline.why_not_captured()

    def takes(self, live: Sequence[tuple[Task, SequenceState]]) -> bool:
        """Whether the next steps of these rows can be taken here."""
        return self.stats.eager is None and all(sequence.tokens for _, sequence in live)

    def run(self, live: Sequence[tuple[Task, SequenceState]]) -> Generator[StepRecord, None, bool]:
        """Take steps of these rows until they have all ended, or so many that fewer rows would do.

        Returns:
            whether the rows go on here; otherwise their next step is one that graphs cannot take.
        """
        sequences = [sequence for _, sequence in live]
        before = [len(sequence.tokens) for sequence in sequences]
        runs = list[Run]()
        try:
            steps = self._steps(sequences)
            for session in self._sessions:
                runs.append(
                    session.begin_run([own.row for own in sequences], [own.tokens[-1] for own in sequences], steps)
                )
            device = self._device(runs, sequences)
            return (yield from self._read(live, device, steps))
        except OutOfBlocks:
            return False
        except (RuntimeError, DecodekitError) as error:
            if any(len(own.tokens) > count for own, count in zip(sequences, before, strict=True)):
                raise
            # Captures end so where a model or rule waits for the device; eager steps tell about everything else.
            self.stats.eager = f"it could not be captured: {str(error).splitlines()[0] if str(error) else error!r}"
            _LOG.warning("steps are launched one by one: %s", self.stats.eager)
            return False
        finally:
            # The last token of a row is not forwarded yet, those before it are.
            forwarded = {
                own.row: own.tokens[count - 1 : len(own.tokens) - 1]
                for own, count in zip(sequences, before, strict=True)
            }
            for session, run in zip(self._sessions, runs, strict=False):
                session.end_run(run, forwarded)
            self._chooser.extend({own.row: own.tokens[count:] for own, count in zip(sequences, before, strict=True)})

    def _steps(self, sequences: Sequence[SequenceState]) -> int:
        """How many steps the next run has: the longest row's, unless one of them may not go that far."""
        left = max(own.limits.max_new_tokens - len(own.tokens) for own in sequences)
        contexts = [
            own.limits.context - len(own.request.prompt_ids) - len(own.tokens)
            for own in sequences
            if own.limits.context is not None
        ]
        limits = [STEPS, left, *contexts]
        for session in self._sessions:
            if (most := most_steps(session.lengths([own.row for own in sequences]))) is not None:
                limits.append(most)
        return max(1, min(limits))

    def _device(self, runs: Sequence[Run], sequences: Sequence[SequenceState]) -> _Device:
        """What the GPU does for these runs, captured, and its tensors filled."""
        forwards = []
        for session, run in zip(self._sessions, runs, strict=True):
            most = max(
                len(own.request.prompt_ids) + own.limits.max_new_tokens - len(own.tokens) + run.steps
                for own in sequences
            )
            forwards.append(_forward_of(session, run, most, self.stats))
        key = (tuple(own.row for own in sequences), *map(id, forwards))
        rows = [own.row for own in sequences]

        def outputs() -> Outputs:
            parts = [
                session.split_run(forward.outputs, rows)
                for session, forward in zip(self._sessions, forwards, strict=True)
            ]
            return Outputs({name: branch for part in parts for name, branch in part.items()})

        if (pick := self._picks.get(key)) is None:
            pick = _Pick(
                self._scorer,
                self._pipeline,
                outputs,
                [forward.frame for forward in forwards],
                sequences,
                logprobs=self._keep_logprobs,
            )
            pick.load(sequences)
            if pick.captures:
                pick.graph = _capture(pick, self.stats)
            self.stats.pick_captures += 1
            self._picks[key] = pick
        pick.load(sequences)
        for forward, run in zip(forwards, runs, strict=True):
            forward.load(run)
        return _Device(forwards, pick)

    def _read(
        self, live: Sequence[tuple[Task, SequenceState]], device: _Device, steps: int
    ) -> Generator[StepRecord, None, bool]:
        rows = len(live)
        for number in range(steps):
            while device.launched < min(number + AHEAD, steps):
                device.launch()
            tokens, broken, logprobs = device.read(number)
            alive = [place for place, (_, sequence) in enumerate(live) if sequence.finish_reason is None]
            if any(broken[place] for place in alive):
                return False
            for task in dict.fromkeys(live[place][0] for place in alive):
                task.steps += 1
            self.stats.steps += 1
            chosen = [int(tokens[place]) for place in alive]
            record = self._chooser.accept(
                [live[place] for place in alive],
                chosen,
                [logprobs[place] for place in alive] if self._keep_logprobs else [],
            )
            yield record
            left = sum(sequence.finish_reason is None for _, sequence in live)
            if not left or (left < rows and bucket(left, device.where) < bucket(rows, device.where)):
                break
        return True


class _Device:
    """The GPU's side of a run: steps are launched, and read in the same order."""

    def __init__(self, forwards: Sequence[_Forward], pick: _Pick) -> None:
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


class _Pick:
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
            counters = [[0, TOKEN_LANE, _signed(s.sample, 32), _signed(s.digest, 32)] for s in streams]
            self._counters = torch.tensor(counters, dtype=torch.int32, device=device)
            self.read = torch.zeros(3, rows, dtype=torch.float64, device=device)
        self.graph: Any = None
        self.captures = device.type == "cuda"

    def load(self, sequences: Sequence[SequenceState]) -> None:
        """The rows have so many tokens now."""
        histories = [[*own.request.prompt_ids, *own.tokens] for own in sequences]
        self._lengths.copy_(torch.tensor([len(own) for own in histories]))
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
        self._counters[:, 0] = self._rows.positions
        logprobs = self.read[2] if self._logprobs else None
        tokens, broken = self._pipeline.pick_blindly(self._rows, scores, self._seeds, self._counters, logprobs)
        self.read[0], self.read[1] = tokens, broken
        for frame in self._frames:
            # Every branch is fed the same token.
            frame.tokens[: frame.used].view(-1, len(tokens)).copy_(tokens)
        if self._width:
            self._tokens.scatter_(1, self._lengths.unsqueeze(1), tokens.unsqueeze(1))
        self._lengths.add_(1)


class _Forward:
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
        self._graph = _capture(self, stats)

    def launch(self) -> None:
        """Forward the tokens that the frame holds."""
        if self._graph is None:
            self()
        else:
            self._graph.replay()


def _forward_of(session: PagedSession, run: Run, most: int, stats: GraphStats) -> _Forward:
    """A forward that serves a run, captured where graphs are.

    Args:
        session: whose rows they are.
        run: the run.
        most: tokens that its longest row may get to have.
        stats: is told of captures.
    """
    cache, rows = session.cache, bucket(len(run.rows), session.cache.device)
    key = session.weights(), session.layers, rows
    shapes = [WorkShape.of(plan) for plan in run.plan(rows)]
    for forward in cache.captured.get(key, ()):
        if all(mine.holds(its) for mine, its in zip(forward.frame.shapes, shapes, strict=True)):
            return forward
    now = max(row.length for row in run.rows) + run.steps
    most = max(now, most)
    blocks = [-(-most // group.pool.block_size) for group in cache.groups]
    growth = min(2.0, most / now)
    roomy = [shape.roomy(count, growth) for shape, count in zip(shapes, blocks, strict=True)]
    forward = _Forward(session, Frame(cache, rows, roomy))
    if cache.device.type == "cuda":
        forward.load(run)
        forward.capture(stats)
        # Only a replay fills it: what lies there may be anything.
        forward.outputs.logits.zero_()
    stats.forward_captures += 1
    cache.captured.setdefault(key, []).append(forward)
    return forward


def _capture(call: Callable[[], None], stats: GraphStats) -> Any:
    """A CUDA graph of a call, which is made once before."""
    held = torch.cuda.memory_reserved()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    collects = gc.isenabled()
    gc.disable()  # what it frees meanwhile, the graph would hold
    try:
        with torch.cuda.stream(stream):
            call()
            pool = _pool()
            stream.synchronize()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    stats.pool_bytes += max(0, torch.cuda.memory_reserved() - held)
    return graph


_POOL: list[Any] = []


def _pool() -> Any:
    """The memory that all graphs share: they run one after the other."""
    if not _POOL:
        handle, keeper = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        # Memory of a pool that no graph uses is gone for good: this one stays.
        keeper.capture_begin(pool=handle, capture_error_mode="thread_local")
        kept = torch.zeros(1, device="cuda")
        keeper.capture_end()
        _POOL.extend([handle, keeper, kept])
    return _POOL[0]


def _signed(number: int, bits: int) -> int:
    """The same bits as a signed number."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number
