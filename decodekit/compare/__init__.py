"""Recipes side by side on the same rows: what they gain, and whether plain decoding would gain it for the same compute.

Cost is counted in tokens that went through the model (a candidate, beam or branch costs as much as a row of its own). The
*matched* baseline of a recipe is, for each row, the best of as many plain samples as the tokens that the recipe forwarded
would buy: the greedy output for one, the sample of highest mean log-probability for more (Stiennon et al., 2020,
arXiv:2009.01325). ``oracle`` is the sample that the metric itself likes best: what a perfect choice could have made of them.

All recipes buy from one pool a prompt, each its first so many samples; it grows until the dearest recipe's tokens are spent.
Where the candidates of a recipe are such samples themselves (a vote over samples of the same temperature and length), they are
the pool's first: the baseline then chooses from what the recipe chose from. What two runs would decode alike is decoded once.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decodekit.compare.intervals import Interval, interval, paired
from decodekit.compare.metrics import Metric
from decodekit.compare.pool import SEEDS, Sample, draws_plain_samples, lacking, price, sampler, samples_of
from decodekit.compare.rows import Progress, Row
from decodekit.core.types import Output
from decodekit.recipe import Recipe, load_recipe
from decodekit.recipe.costs import cost_of
from decodekit.runtime.decoder import Decoder

PLAIN = "plain"
"""The run of greedy decoding."""
POOL = "samples"
"""The run of plain samples."""
ENDINGS = ("eos_token_id", "stop_strings", "suppress_tokens", "min_new_tokens")
"""Options of the first recipe that plain decoding has, too: they say when an output is over."""

Status = Callable[[str, int, int], None]
"""Told what is decoded next, and of all the work what is done and how much there is."""


@dataclass(frozen=True)
class Line:
    """What became of a recipe; means a row.

    Attributes:
        quality: under the metric.
        gain: over the first recipe; ``None`` for itself.
        samples: plain samples that its compute buys.
        matched: quality of the best of them, as plain decoding can choose.
        oracle: quality of the best of them, as the metric chooses.
        over_matched: gain over ``matched``.
        forwards: passes of the model.
        forwarded_tokens: through the model.
        tokens: of output; of all candidates none counts but the chosen one.
        seconds: of a batch, divided among its rows; the batches of all recipes have as many rows of the model.
        kv_bytes: of K/V at their peak, likewise.
        failed: rows that could not be decoded; their quality is 0.
    """

    recipe: str
    rows: int
    quality: Interval
    gain: Interval | None
    samples: float
    matched: Interval
    oracle: float
    over_matched: Interval
    forwards: float
    forwarded_tokens: float
    tokens: float
    seconds: float
    kv_bytes: float
    failed: int

    @property
    def verdict(self) -> str:
        """Whether it earned its cost."""
        if self.over_matched.low > 0:
            return "earns its cost"
        return "costs more than it brings" if self.over_matched.high < 0 else "undecided"


class Comparison:
    """Recipes on rows.

    Args:
        recipes: by name; all others are compared with the first.
        rows: prompts and what is expected.
        metric: rates an output.
        progress: keeps what was decoded.
        batch: rows of the model side by side: a prompt that a recipe makes eight candidates of counts eight times.
    """

    def __init__(
        self, recipes: Mapping[str, Recipe], rows: Sequence[Row], metric: Metric, progress: Progress, *, batch: int
    ) -> None:
        self._recipes, self._rows, self._metric = recipes, rows, metric
        self._progress, self._batch = progress, batch
        first = next(iter(recipes.values())).generation
        given = first.model_dump(include=set(ENDINGS), exclude_none=True)
        lengths = [recipe.generation.max_new_tokens or 0 for recipe in recipes.values()]
        options = {**given, **({"max_new_tokens": max(lengths)} if all(lengths) else {})}
        self._sampler = sampler(options)
        self._runs = {PLAIN: load_recipe({"generation": {**options, "do_sample": False}}), **recipes}
        self._costs = {name: cost_of(recipe).forwarded_tokens for name, recipe in self._runs.items()}
        self._keeps = {name for name, recipe in recipes.items() if draws_plain_samples(recipe, self._sampler)}

    def run(self, model: Any, tokenizer: Any, models: Mapping[str, Mapping[str, Any]], status: Status) -> None:
        """Decode what has not been decoded yet; the recipes take turns, so that a part of the rows is a comparison too.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            models: a recipe's name, the other models that it needs.
            status: told before each batch.
        """
        count = len(self._rows)
        sizes = {name: max(1, self._batch // cost) for name, cost in self._costs.items()}
        decoders = {name: Decoder(recipe).bind(models=models.get(name)) for name, recipe in self._runs.items()}
        ends, step = dict.fromkeys(sizes, 0), min(sizes.values())
        for first in range(0, count, step):
            last = min(first + step, count)
            for name, decoder in decoders.items():
                while ends[name] < last:
                    rows = range(ends[name], min(ends[name] + sizes[name], count))
                    ends[name] = rows.stop
                    if todo := self._begin(name, rows, status):
                        self._decode(name, decoder, todo, model, tokenizer)
            if todo := self._begin(POOL, range(first, last), status):
                self._fill(todo, model, tokenizer)

    def complete(self) -> list[int]:
        """The rows that every recipe has decoded, with the plain samples that these would buy."""
        runs = [*self._runs, POOL]
        return [row for row in range(len(self._rows)) if all((run, row) in self._progress.done for run in runs)]

    def lines(self) -> list[Line]:
        """A line a recipe, over the rows that all have decoded; none where there is no such row."""
        rows = self.complete()
        if not rows:
            return []
        quality = {name: [self._quality(row, self._noted(name, row)) for row in rows] for name in self._runs}
        return [self._line(name, rows, quality) for name in self._runs]

    def frontier(self) -> list[tuple[float, float]]:
        """(forwarded tokens a row, quality) of the best of 1, 2, ... plain samples, for the plot."""
        rows = self.complete()
        points = []
        for count in range(2, min((len(self._samples(row)) for row in rows), default=0) + 1):
            cost = statistics.mean(self._price(row, count) for row in rows)
            points.append((cost, statistics.mean(self._best(row, count)[0] for row in rows)))
        return points

    def _begin(self, name: str, rows: range, status: Status) -> list[int]:
        """Those of a batch's rows that a run lacks; tells that they come next, weighing rows by what they cost."""
        known = self._progress.done
        todo = [row for row in rows if (name, row) not in known]
        if todo:
            done = sum(self._costs.get(run, 1) for run, _ in known)
            total = (sum(self._costs.values()) + 1) * len(self._rows)
            status(f"{name}: rows {rows.start + 1} to {rows.stop} of {len(self._rows)}", done, total)
        return todo

    def _decode(self, name: str, decoder: Decoder, todo: Sequence[int], model: Any, tokenizer: Any) -> None:
        if (twin := self._twin(name)) is not None:
            for row in todo:
                self._progress.note(name, row, self._noted(twin, row))
            return
        started = time.perf_counter()
        outputs = decoder.run(model, tokenizer, [self._rows[row].prompt for row in todo], num_return_sequences=1)
        seconds = time.perf_counter() - started
        for row, output in zip(todo, outputs, strict=True):
            samples = {"samples": samples_of(output)} if name in self._keeps else {}
            self._progress.note(name, row, {**_noted(output, len(todo), seconds), **samples})

    def _twin(self, name: str) -> str | None:
        """The first run before this one that decodes the same; drawn without a seed, nothing is."""
        recipe = self._runs[name]
        if recipe.generation.do_sample and recipe.generation.seed is None:
            return None
        first = next(own for own, other in self._runs.items() if other == recipe)
        return None if first == name else first

    def _fill(self, todo: Sequence[int], model: Any, tokenizer: Any) -> None:
        """Draw plain samples of these rows until the tokens of each row's dearest recipe are spent."""
        samples = {row: self._drawn(row) for row in todo}
        lacks = {row: self._lacks(row, own) for row, own in samples.items()}
        decoder = Decoder(self._sampler)
        while jobs := [(row, len(samples[row]) + more) for row in todo for more in range(lacks[row])]:
            outputs = list[Output]()
            for first in range(0, len(jobs), self._batch):
                prompts = [
                    {**self._rows[row].prompt, "seed": SEEDS + number}
                    for row, number in jobs[first : first + self._batch]
                ]
                outputs += decoder.run(model, tokenizer, prompts)
            failed = set[int]()
            for (row, _), output in zip(jobs, outputs, strict=True):
                samples[row] += samples_of(output)
                failed |= {row} if output.error else set()
            lacks = {row: 0 if row in failed else self._lacks(row, own) for row, own in samples.items()}
        for row, own in samples.items():
            self._progress.note(POOL, row, {"samples": own})

    def _drawn(self, row: int) -> list[Sample]:
        """The plain samples that a recipe has drawn already."""
        kept: Iterable[list[Sample]] = (self._noted(name, row)["samples"] for name in self._keeps)
        return [*max(kept, key=len, default=[])]

    def _lacks(self, row: int, samples: Sequence[Sample]) -> int:
        plain = self._noted(PLAIN, row)
        budget = max(self._noted(name, row)["forwarded_tokens"] for name in self._recipes)
        return lacking(samples, budget, plain["prompt_tokens"], plain["tokens"])

    def _noted(self, name: str, row: int) -> dict[str, Any]:
        return self._progress.done[name, row]

    def _quality(self, row: int, noted: Mapping[str, Any]) -> float:
        return 0.0 if noted.get("error") else self._metric(noted["text"], self._rows[row].reference)

    def _samples(self, row: int) -> list[Sample]:
        samples: list[Sample] = self._noted(POOL, row)["samples"]
        return samples

    def _price(self, row: int, count: int) -> int:
        return price(self._noted(PLAIN, row)["prompt_tokens"], self._samples(row)[:count])

    def _bought(self, row: int, budget: int) -> int:
        return max(
            [1, *(count for count in range(2, len(self._samples(row)) + 1) if self._price(row, count) <= budget)]
        )

    def _best(self, row: int, count: int) -> tuple[float, float]:
        """Quality of the best of so many plain samples as its probability chooses, and as the metric does."""
        samples = self._samples(row)[:count] if count > 1 else []
        if not samples:
            plain = self._quality(row, self._noted(PLAIN, row))
            return plain, plain
        values = [self._quality(row, sample) for sample in samples]
        chosen = max(range(len(samples)), key=lambda place: (samples[place]["score"], -place))
        return values[chosen], max(values)

    def _line(self, name: str, rows: Sequence[int], quality: Mapping[str, Sequence[float]]) -> Line:
        noted = [self._noted(name, row) for row in rows]
        bought = [self._bought(row, own["forwarded_tokens"]) for row, own in zip(rows, noted, strict=True)]
        best = [self._best(row, count) for row, count in zip(rows, bought, strict=True)]
        first = next(iter(self._recipes))

        def mean(field: str) -> float:
            return statistics.mean(own.get(field) or 0 for own in noted)

        return Line(
            recipe=name,
            rows=len(rows),
            quality=interval(quality[name]),
            gain=None if name == first else paired(quality[name], quality[first]),
            samples=statistics.mean(bought),
            matched=interval([own for own, _ in best]),
            oracle=statistics.mean(own for _, own in best),
            over_matched=paired(quality[name], [own for own, _ in best]),
            forwards=mean("forwards"),
            forwarded_tokens=mean("forwarded_tokens"),
            tokens=mean("tokens"),
            seconds=mean("seconds"),
            kv_bytes=mean("kv_bytes"),
            failed=sum(bool(own.get("error")) for own in noted),
        )


def as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Plain data; intervals are ``{"mean", "low", "high"}``."""

    def plain(value: Any) -> Any:
        return value._asdict() if isinstance(value, Interval) else value

    return [
        {field.name: plain(getattr(line, field.name)) for field in dataclasses.fields(line)} | {"verdict": line.verdict}
        for line in lines
    ]


def _noted(output: Output, batch: int, seconds: float) -> dict[str, Any]:
    """What is kept of a row; its part of what its batch took."""
    stats = output.stats
    return {
        "text": output.text,
        "error": output.error,
        "forwards": stats.get("target_forwards", 0),
        "forwarded_tokens": stats.get("forwarded_tokens", 0),
        "prompt_tokens": stats.get("prompt_tokens", 0),
        "tokens": len(output.token_ids),
        "seconds": seconds / batch,
        "kv_bytes": stats.get("kv_bytes", 0) / batch,
    }
