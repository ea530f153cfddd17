"""``python -m decodekit.testing.soak --minutes 30``: mixed requests with everything that goes wrong, and what is left of it.

Requests of many kinds share one small paged cache; some are cancelled or interrupted, some have plugins that break, some find
the pool exhausted. Every request that should succeed is compared with what it gave on a cache of its own at the beginning.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from decodekit.cache.allocator import OutOfBlocks
from decodekit.cache.paged import PagedCache
from decodekit.core.compat import CACHE_KEY
from decodekit.core.errors import PluginError, RowError
from decodekit.core.protocols import Rule
from decodekit.core.types import Rows
from decodekit.recipe import Recipe, load_recipe
from decodekit.runtime.decoder import Decoder
from decodekit.testing.models import tiny_model, tiny_tokenizer

RECIPES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"rules": [{"kind": "top_p", "p": 0.9}], "generation": {"do_sample": True, "seed": 3}},
    "penalties": {"rules": [{"kind": "repetition_penalty", "penalty": 1.3}, {"kind": "no_repeat_ngram", "n": 3}]},
    "cfg": {"strategy": {"kind": "cfg", "guidance_scale": 2.0}},
    "beam": {"strategy": {"kind": "beam", "num_beams": 3}},
    "vote": {"strategy": {"kind": "self_consistency", "n": 3}, "generation": {"do_sample": True, "seed": 1}},
    "drafts": {"drafter": {"kind": "ngram", "schedule": "constant"}},
    "regex": {"constraint": {"kind": "regex", "pattern": "[a-f0-9 ]{3,12}"}},
    "audited": {"audit": 0.2},
}
SAME_AS = {"drafts": "greedy", "audited": "greedy"}
"""Recipes whose tokens are another's, by definition."""

PAUSE_S = 2.0
"""What takes longer is told of, with where it was by then."""

PROMPTS = ("Who won?", "a", "1 2 3 1 2 3 1 2", "The other one, please: 1 + 2 = ", "the lamp is red, the lamp is green")


@dataclass
class Report:
    """What a soak found.

    Attributes:
        requests: that were made, by kind.
        tokens: that came out.
        mismatches: requests whose tokens were others than at the beginning.
        leaked_blocks: most blocks in use between two requests.
        longest_s: seconds of the longest request.
        pauses: requests that took more than ``PAUSE_S``. Little CPU time of them: other processes had it.
        usable_s: most seconds from an interrupt to the next token.
        memory_bytes: resident, after the warm-up and at the end.
        growth: of memory, as a share.
    """

    requests: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    mismatches: list[str] = field(default_factory=list)
    leaked_blocks: int = 0
    longest_s: float = 0.0
    pauses: list[str] = field(default_factory=list)
    usable_s: float = 0.0
    memory_bytes: tuple[int, int] = (0, 0)
    growth: float = 0.0


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C of the soak's own, and when it came; that of whoever runs it ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.since = time.perf_counter()


class Breaking(Rule):
    """A rule that goes wrong in one way, at one place of the output."""

    kind: Literal["breaking"] = "breaking"
    place: int
    how: Literal["raise", "row", "nan", "shape", "edit", "interrupt"]

    def __call__(self, rows: Rows, logits: Tensor) -> Tensor:
        """[P, V] to [P, V], or whatever it breaks."""
        if self.place not in rows.positions.tolist():
            return logits
        match self.how:
            case "raise":
                raise ZeroDivisionError
            case "row":
                raise RowError("this row ends here")
            case "interrupt":
                raise Interrupted
            case "nan":
                return logits * float("nan")
            case "shape":
                return logits[:, 1:]
            case _:
                return logits.zero_()


class Soak:
    """Requests over one model and one cache.

    Args:
        seed: of what is asked for.
    """

    def __init__(self, seed: int = 0) -> None:
        self.model, self.tokenizer = tiny_model("hybrid", dtype=torch.float64, layers=2), tiny_tokenizer()
        self.report, self._rng = Report(), random.Random(seed)
        self._cache, self._small = self._new_cache(256), self._new_cache(6)
        self._known: dict[str, list[list[int]]] = {}

    def _new_cache(self, blocks: int) -> PagedCache:
        return PagedCache(self.model.config, num_blocks=blocks, block_size=4, host_bytes=1 << 16)

    def _decode(self, recipe: Recipe, prompts: Sequence[str], cache: PagedCache, new: int = 10) -> list[list[int]]:
        options = {"raw": True, "max_new_tokens": new, CACHE_KEY: cache}
        outputs = Decoder(recipe).run(self.model, self.tokenizer, list(prompts), **options)
        self.report.tokens += sum(len(output.token_ids) for output in outputs)
        return [output.token_ids for output in outputs]

    def request(self) -> None:
        """One request of a kind that is drawn, and a look at what it left."""
        kinds: list[tuple[Callable[[], None], int]] = [
            (self._plain, 10),
            (self._left, 2),
            (self._broken, 2),
            (self._exhausted, 2),
            (self._reset, 1),
        ]
        [kind] = self._rng.choices([own for own, _ in kinds], [weight for _, weight in kinds])
        started = time.perf_counter()
        with self._watched(kind.__name__.strip("_")):
            kind()
        self.report.longest_s = max(self.report.longest_s, time.perf_counter() - started)
        used = [group.pool.used_blocks for cache in (self._cache, self._small) for group in cache.groups]
        self.report.leaked_blocks = max(self.report.leaked_blocks, *used)

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Report a pause: how long, how much of it was work, and where it was after ``PAUSE_S``."""
        own, where = threading.get_ident(), list[str]()
        timer = threading.Timer(PAUSE_S, lambda: where.extend(_places(sys._current_frames()[own])))
        started, worked = time.perf_counter(), time.process_time()
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if (seconds := time.perf_counter() - started) > PAUSE_S:
            worked = time.process_time() - worked
            told = f"{name}: {seconds:.1f} s, {worked:.1f} s of CPU time"
            self.report.pauses.append(", ".join([told, *where]))

    def _plain(self) -> None:
        name, count = self._rng.choice([*RECIPES]), self._rng.randint(1, 4)
        self.report.requests[name] += 1
        prompts, known = self._rng.sample(PROMPTS, count), self._expected(name)
        found = self._decode(load_recipe(RECIPES[name]), prompts, self._cache)
        if found != [known[PROMPTS.index(prompt)] for prompt in prompts]:
            self.report.mismatches.append(f"{name}: {prompts}")

    def _expected(self, name: str) -> list[list[int]]:
        """Tokens of a recipe for each of the prompts, on a cache of its own."""
        if name not in self._known:
            plain = load_recipe(RECIPES[SAME_AS.get(name, name)])
            self._known[name] = [self._decode(plain, [prompt], self._new_cache(256))[0] for prompt in PROMPTS]
        return self._known[name]

    def _left(self) -> None:
        """A stream that its reader leaves after some pieces."""
        self.report.requests["left early"] += 1
        options = {"raw": True, "max_new_tokens": 10, CACHE_KEY: self._cache}
        pieces = Decoder(load_recipe({})).stream(self.model, self.tokenizer, self._rng.choice(PROMPTS), **options)
        for _, _ in zip(range(self._rng.randint(0, 9)), pieces, strict=False):
            pass
        del pieces

    def _broken(self) -> None:
        how = self._rng.choice(["raise", "row", "nan", "shape", "edit", "interrupt"])
        self.report.requests[f"broken: {how}"] += 1
        name = self._rng.choice(["greedy", "beam", "drafts", "cfg"])
        recipe = load_recipe(RECIPES[name])
        recipe = recipe.model_copy(update={"rules": (Breaking(place=self._rng.randint(0, 9), how=how),)})
        known = self._expected("greedy")
        try:
            self._decode(recipe, self._rng.sample(PROMPTS, 3), self._cache)
        except (PluginError, RowError):
            pass
        except Interrupted as interrupt:
            [token] = self._decode(load_recipe({}), PROMPTS[:1], self._cache, new=1)
            self.report.usable_s = max(self.report.usable_s, time.perf_counter() - interrupt.since)
            if token != known[0][:1]:
                self.report.mismatches.append("the first token after an interrupt")

    def _exhausted(self) -> None:
        self.report.requests["exhausted"] += 1
        try:
            self._decode(load_recipe({}), PROMPTS, self._small)
        except OutOfBlocks:
            return
        self.report.mismatches.append("a pool of 6 blocks held 5 prompts")

    def _reset(self) -> None:
        self.report.requests["reset"] += 1
        self._cache.reset()


def soak(*, minutes: float | None = None, requests: int | None = None, seed: int = 0) -> Report:
    """Make requests for so many minutes, or so many of them."""
    run, started, sizes = Soak(seed), time.perf_counter(), list[int]()
    while True:
        done, seconds = run.report.requests.total(), time.perf_counter() - started
        if (requests is not None and done >= requests) or (minutes is not None and seconds >= 60 * minutes):
            break
        run.request()
        if done % 20 == 0:
            gc.collect()
            sizes.append(_resident())
    # Allocators and caches of imports fill up at first.
    tenth = max(1, len(sizes) // 10)
    before, after = int(median(sizes[2 * tenth : 3 * tenth] or sizes)), int(median(sizes[-tenth:]))
    run.report.memory_bytes, run.report.growth = (before, after), after / before - 1
    return run.report


def _places(frame: FrameType) -> list[str]:
    """The innermost calls."""
    return [f"{Path(call.filename).stem}:{call.lineno} {call.name}" for call in traceback.extract_stack(frame)[-12:]]


def _resident() -> int:
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report as JSON; 1 where anything leaked, differed, or grew."""
    parser = argparse.ArgumentParser(prog="python -m decodekit.testing.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    report = soak(minutes=options.minutes, seed=options.seed)
    json.dump(vars(report), sys.stdout, indent=2)
    print()
    return 1 if report.mismatches or report.leaked_blocks or report.growth > 0.01 or report.usable_s > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
