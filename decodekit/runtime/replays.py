"""Single steps whose forward comes from a graph.

Where the host decides from step to step what is forwarded (drafts, searches, requests that come and go), it plans each forward
and waits for what it gives; but the operations of the forward, which take it longer to launch than the GPU to run, are launched
as one.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from decodekit.cache.fixed import PACKED, bucket
from decodekit.cache.packed import PackedPlan
from decodekit.core.errors import Refused
from decodekit.core.types import BranchOutputs
from decodekit.runtime.capture import GraphStats, Look, captures, look
from decodekit.runtime.forwards import PackedForward, key_of, packed_forward_of
from decodekit.runtime.session import Ids

if TYPE_CHECKING:
    from decodekit.runtime.places import PlacedSession

_LOG = logging.getLogger(__name__)

WAIT = 1
"""Steps of a size that are launched before it is captured, which takes as long as some ten of them."""


class _NotCaptured(Exception):
    """A forward could not be captured."""


class Replays:
    """Captured forwards of a session, for packed steps of few tokens.

    A size is captured once a step of it was launched operation by operation.

    Attributes:
        stats: what came from graphs.
        steady: the last step took as long as others like it will.
    """

    def __init__(self) -> None:
        self.steady = True
        self._key: tuple[Hashable, ...] | None = None
        self._look: Look | None = None
        self.stats = GraphStats()

    @contextmanager
    def open(self, session: PlacedSession) -> Iterator[None]:
        """A context in which the session's model runs at its fastest; only there forwards are captured."""
        if captures(session.cache.device) and session.why_no_run() is None and self.stats.alone is None:
            self._look = look(session.model)
            self._key = None if self._look.hooked else (*key_of(session), "packed")
        try:
            yield
        finally:
            self._key = None

    def step(self, session: PlacedSession, places: Sequence[int], tokens: Sequence[Ids]) -> BranchOutputs | None:
        """Forward the next tokens of places that can be packed; ``None`` where no captured forward takes them.

        Args:
            session: whose they are.
            places: [R] of the cache.
            tokens: [R] their tokens, N in all.

        Returns:
            the outputs at all N; the next step overwrites them.
        """
        count, self.steady = sum(map(len, tokens)), True
        if self._key is None or self._look is None or count > PACKED[-1]:
            return None
        if not self._look.hooks_hold(session.model):
            return None
        cache, captures_before, self.steady = session.cache, self.stats.forward_captures, False
        size = bucket(count, cache.device, PACKED)
        try:
            with cache.begin(places, tokens, direct=True, packed=True) as step:
                forward = self._launch(session, PackedPlan(cache, step, size), (*self._key, size))
                step.replayed(forward.frame.paths)
        except _NotCaptured as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                return None  # there may be room another time
            self._key, self.stats.alone = None, str(error)
            # What kernels do not serve is known beforehand.
            level = logging.INFO if isinstance(error.__cause__, Refused) else logging.WARNING
            _LOG.log(level, "forwards are launched operation by operation: %s", error)
            return None
        self.stats.forwards += forward.captured
        self.steady = forward.captured and self.stats.forward_captures == captures_before
        return forward.outputs.span(0, count)

    def _launch(self, session: PlacedSession, plan: PackedPlan, key: tuple[Hashable, ...]) -> PackedForward:
        try:
            forward = packed_forward_of(session, plan, key, self.stats, WAIT)
            forward.launch()
        except Exception as error:
            text = str(error)
            raise _NotCaptured(text.splitlines()[0] if text else repr(error)) from error
        return forward
