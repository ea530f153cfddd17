"""Continuous batching: requests that come and go share forwards, each with a recipe of its own.

There is no thread of the engine's own: whoever waits for a request (``stream``, ``result``, ``results``) runs the steps, for
all. Calls may come from any thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from decodekit.core import compat
from decodekit.core.errors import InputError
from decodekit.core.types import Output
from decodekit.recipe import Recipe, load_recipe
from decodekit.runtime.batch import Batch
from decodekit.runtime.decoder import Decoder
from decodekit.runtime.intake import Intake
from decodekit.runtime.jobs import Job
from decodekit.runtime.scheduler import Policy, Rules
from decodekit.runtime.text import Prompt


class EngineRequest:
    """A request that was submitted.

    Attributes:
        id: its name.
    """

    def __init__(self, engine: Engine, job: Job) -> None:
        self.id = job.id
        self._engine, self._job = engine, job

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self._job.outputs is not None

    def stream(self) -> Iterator[str]:
        """Its text piece by piece, as it becomes certain; that of a strategy which chooses at the end comes at the end."""
        while True:
            piece = self._engine._wait(self._job.piece)
            if not piece:
                return
            yield piece

    def results(self) -> list[Output]:
        """All its outputs, the best first; waits for them. :meth:`Engine.results` then leaves it out.

        It raises nothing for a request that failed: ``finish_reason`` is then ``error``, and ``Output.error`` says why.
        """
        outputs: list[Output] = self._engine._wait(lambda: self._job.outputs)
        self._engine._taken(self.id)
        return outputs

    def result(self) -> Output:
        """Its output, the best of several; waits for it.

        It raises nothing for a request that failed: ``finish_reason`` is then ``error``, and ``Output.error`` says why.
        """
        return self.results()[0]

    def cancel(self) -> None:
        """End it where it stands."""
        self._engine.cancel(self)

    def __repr__(self) -> str:
        state = self._job.outputs[0].finish_reason if self._job.outputs else "decoding"
        return f"{type(self).__name__}({self.id!r}, {state})"


class Engine:
    """Decodes requests as they come, with as many rows at once as blocks of K/V allow.

    Args:
        model: the causal language model.
        tokenizer: its tokenizer.
        recipe: how to decode what comes without a recipe of its own: a file, a mapping or a Decoder; its ``cache`` gives the
            blocks' size and quantization.
        budget: most bytes of K/V and recurrent states, such as ``"4GiB"``; the recipe's when left out, else enough for all
            slots at the model's full context, at most 4 GiB, or 80 % of what is free on a GPU. Without Triton's kernels, what
            steps gather for attention comes on top.
        slots: most rows at once: requests, samples and beams.
        tokens_per_step: most tokens to forward in a step: one of each row first, then prompts, in chunks.
        policy: who goes first: ``fcfs``, ``shortest_remaining`` or ``deadline`` (``max_time``).
        promise: part of a request's ``max_new_tokens`` that is kept free for it when it is taken in, 0 to 1; with 1 none is
            ever put aside for want of blocks.
        preemption: how a request is put aside: ``recompute`` its tokens later, or ``offload`` its K/V and states to the host.
        patience: steps in the queue after which a request goes before all others.
        prefix_cache: let prompts reuse the blocks of earlier ones that begin alike.
        models: other models by name, as :meth:`Decoder.bind` takes them.

    Raises:
        Refused: this model's cache cannot be paged.
        InputError: a number is out of range, or the budget holds no block.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        recipe: Decoder | Recipe | str | Path | Mapping[str, Any] | None = None,
        budget: int | str | None = None,
        *,
        slots: int = 64,
        tokens_per_step: int = 2048,
        policy: Policy = "fcfs",
        promise: float = 0.1,
        preemption: Literal["recompute", "offload"] = "recompute",
        patience: int = 256,
        prefix_cache: bool = True,
        models: Mapping[str, Any] | None = None,
    ) -> None:
        if preemption not in ("recompute", "offload"):
            raise InputError(f"preemption is {preemption!r}; give recompute or offload")
        if not hasattr(model, "generate"):
            raise InputError(
                f"expected a model that generates, got {model!r}; AutoModelForCausalLM.from_pretrained loads one"
            )
        compat.check_model(model)
        rules = Rules(slots, tokens_per_step, policy, promise, patience)
        decoder = recipe if isinstance(recipe, Decoder) else Decoder(_recipe(recipe or {}))
        self._intake = Intake(model, tokenizer, decoder.recipe, {**decoder.models, **(models or {})})
        self._batch = Batch(
            self._intake, rules, budget=budget, prefix_cache=prefix_cache, offload=preemption == "offload"
        )
        self._ids: set[str] = set()
        self._open: dict[str, EngineRequest] = {}
        self._orders = itertools.count()
        self._gate, self._turn = threading.Lock(), threading.RLock()
        # The thread that is inside, and what it wants cancelled when its step ends.
        self._owner: int | None = None
        self._cancelled: list[str] = []

    def submit(
        self,
        prompt: Prompt | Sequence[int],
        id: str | int | None = None,
        recipe: Decoder | Recipe | str | Path | Mapping[str, Any] | None = None,
        *,
        raw: bool = False,
        **generation_options: Any,
    ) -> EngineRequest:
        """Queue a prompt.

        Args:
            prompt: a text, chat messages, token ids, or ``{"prompt": ..., "context": ..., "seed": ...}``.
            id: a name that no other request has had; the next free number when left out.
            recipe: how to decode it; the engine's when left out. Its ``cache`` must be the engine's, or be left out.
            raw: the text skips the chat template.
            generation_options: options of a recipe's ``generation``, which beat it.

        Raises:
            InputError: the id was used before, the prompt cannot be decoded, or it never fits into the budget.
            Refused: the recipe cannot be honoured here.
        """
        order = next(self._orders)
        name = str(order) if id is None else str(id)
        work = self._intake.read(
            prompt, None if recipe is None else _recipe(recipe), raw=raw, options=generation_options
        )
        if lacking := self._batch.lacks(work):
            with self._exclusive():
                self._batch.add_models(lacking, work)
        job = Job(name, order, work, *self._batch.rows(work), submitted=time.perf_counter())
        self._batch.scheduler.check(job)
        with self._exclusive():
            while id is None and job.id in self._ids:
                job.id = str(next(self._orders))
            if job.id in self._ids:
                raise InputError(f"a request with the id {name!r} was submitted before; give another, or none")
            self._batch.add(job)
            self._ids.add(job.id)
            request = self._open[job.id] = EngineRequest(self, job)
        return request

    def cancel(self, request: EngineRequest | str) -> None:
        """End a request where it stands: what it has is its output, and its blocks are free when this returns.

        One that is over, or that there never was, is left alone. A call from within a step (a rule, a signal's handler) takes
        effect when that step ends.
        """
        name = request.id if isinstance(request, EngineRequest) else request
        if self._owner == threading.get_ident():
            self._cancelled.append(name)
            return
        with self._exclusive():
            self._cancel(name)

    def results(self) -> Iterator[tuple[str, Output]]:
        """(id, output) of each request as it ends, several of one in a row; until none is left.

        Those whose results somebody has taken already are left out; until somebody does, they are kept. Failures come as
        outputs, too: ``finish_reason`` is then ``error``, and ``Output.error`` says why.
        """
        while True:
            request = self._wait(self._finished)
            if request is None:
                return
            for output in request.results():
                yield request.id, output

    def step(self) -> bool:
        """Decode one step for all; whether there was anything to do."""
        with self._exclusive():
            return self._step()

    @property
    def slots(self) -> int:
        """Most rows at once."""
        return self._batch.scheduler.rules.slots

    @property
    def tokens(self) -> int:
        """Tokens chosen so far."""
        return self._batch.tokens

    def stats(self) -> dict[str, Any]:
        """Steps, tokens and seconds so far, requests waiting and running, and the cache's own figures."""
        with self._exclusive():
            return self._batch.stats()

    def close(self) -> None:
        """Cancel all that is left, and give everything back."""
        with self._exclusive():
            for request in self._open.values():
                if not request.done:
                    self._batch.cancel(request._job)
            self._batch.close()
            for session in self._batch.sessions:
                session.cache.free()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _cancel(self, name: str) -> None:
        known = self._open.get(name)
        if known is not None and not known.done:
            self._batch.cancel(known._job)

    def _finished(self) -> EngineRequest | None:
        return None if not self._batch.ended else self._open[next(iter(self._batch.ended))]

    def _taken(self, name: str) -> None:
        """Somebody has the results of this request."""
        with self._exclusive():
            self._open.pop(name, None)
            self._batch.ended.pop(name, None)

    def _wait(self, get: Any) -> Any:
        """Run steps until ``get`` gives something; ``None`` once nothing is left to do."""
        while True:
            with self._exclusive():
                if (found := get()) is not None or not self._step():
                    return found if found is not None else get()

    def _step(self) -> bool:
        if not self._batch.busy:
            return False
        try:
            self._batch.step()
        finally:
            while self._cancelled:
                self._cancel(self._cancelled.pop())
        return True

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One thread at a time; whoever waits gets in between two steps.

        Raises:
            InputError: this thread is inside already.
        """
        if self._owner == threading.get_ident():
            raise InputError(
                "the engine was called from within one of its own steps (by a rule, a strategy or a signal's handler), where "
                "only cancel is possible; call it after the step, or from another thread and do not wait for that one"
            )
        try:
            with self._gate:
                self._turn.acquire()
            self._owner = threading.get_ident()
            yield
        finally:
            if self._owner == threading.get_ident():
                self._owner = None
            with suppress(RuntimeError):  # an interrupt came before this thread had the turn
                self._turn.release()


def _recipe(given: Decoder | Recipe | str | Path | Mapping[str, Any]) -> Recipe:
    if isinstance(given, Decoder):
        return given.recipe
    return given if isinstance(given, Recipe) else load_recipe(given)
