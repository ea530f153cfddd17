"""Recipes side by side on the same rows: what they gain, and whether plain decoding would gain it for the same compute.

Cost is counted in tokens that went through the model (a candidate, beam or branch costs as much as a row of its own). The
*matched* baseline of a recipe is, for each row, the best of as many plain samples as the tokens that the recipe forwarded
would buy: the greedy output for one, the sample of highest mean log-probability for more (Stiennon et al., 2020,
arXiv:2009.01325). ``oracle`` is the sample that the metric itself likes best: what a perfect choice could have made of them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decodekit.compare.intervals import Interval, interval, paired
from decodekit.compare.metrics import Metric
from decodekit.compare.rows import Progress, Row
from decodekit.core.types import Output
from decodekit.recipe import Recipe
from decodekit.runtime.api import load
from decodekit.runtime.decoder import Decoder

PLAIN = "plain"
"""The run of greedy decoding."""
POOL = "samples"
"""The run of plain samples."""
TEMPERATURE = 0.7
MOST_SAMPLES = 64
ENDINGS = ("eos_token_id", "stop_strings", "suppress_tokens", "min_new_tokens")
"""Options of the first recipe that plain decoding has, too: they say when an output is over."""

Status = Callable[[str, int, int], None]
"""Told what is decoded next, and of all runs the rows that are done and the rows that there are."""


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
        kv_bytes: of K/V at their peak, of the whole batch.
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
        batch: rows that are decoded side by side.
    """

    def __init__(
        self, recipes: Mapping[str, Recipe], rows: Sequence[Row], metric: Metric, progress: Progress, *, batch: int
    ) -> None:
        self._recipes, self._rows, self._metric = recipes, rows, metric
        self._progress, self._batch = progress, batch
        first = next(iter(recipes.values())).generation
        given = first.model_dump(include=set(ENDINGS), exclude_none=True)
        lengths = [recipe.generation.max_new_tokens or 0 for recipe in recipes.values()]
        self._options = {**given, **({"max_new_tokens": max(lengths)} if all(lengths) else {}), "do_sample": False}

    def run(self, model: Any, tokenizer: Any, models: Mapping[str, Mapping[str, Any]], status: Status) -> None:
        """Decode what has not been decoded yet; the recipes take turns, so that a part of the rows is a comparison too.

        Args:
            model: the model.
            tokenizer: its tokenizer.
            models: a recipe's name, the other models that it needs.
            status: told before each batch.
        """
        decoders = {PLAIN: load({"generation": self._options})}
        decoders |= {name: Decoder(recipe).bind(models=models[name]) for name, recipe in self._recipes.items()}
        for first in range(0, len(self._rows), self._batch):
            for name, decoder in decoders.items():
                self._decode(name, decoder, first, model, tokenizer, status)
        if (count := self._count()) < 2:
            return
        pool = load(
            {
                "strategy": {"kind": "best_of_n", "n": count, "scorer": "logprob"},
                "rules": [{"kind": "temperature", "t": TEMPERATURE}],
                "generation": {**self._options, "do_sample": True, "seed": 0},
            }
        )
        for first in range(0, len(self._rows), self._batch):
            self._decode(POOL, pool, first, model, tokenizer, status)

    def complete(self) -> list[int]:
        """The rows that every recipe has decoded."""
        runs = [PLAIN, *self._recipes]
        return [row for row in range(len(self._rows)) if all((run, row) in self._progress.done for run in runs)]

    def lines(self) -> list[Line]:
        """A line a recipe, over the rows that all have decoded; none where there is no such row."""
        rows = self.complete()
        if not rows:
            return []
        names = [PLAIN, *self._recipes]
        quality = {name: [self._quality(row, self._noted(name, row)) for row in rows] for name in names}
        return [self._line(name, rows, quality) for name in names]

    def frontier(self) -> list[tuple[float, float]]:
        """(forwarded tokens a row, quality) of the best of 1, 2, ... plain samples, for the plot."""
        rows = [row for row in self.complete() if (POOL, row) in self._progress.done]
        points = []
        for count in range(2, min((len(self._samples(row)) for row in rows), default=0) + 1):
            cost = statistics.mean(self._price(row, count) for row in rows)
            points.append((cost, statistics.mean(self._best(row, count)[0] for row in rows)))
        return points

    def _decode(self, name: str, decoder: Decoder, first: int, model: Any, tokenizer: Any, status: Status) -> None:
        todo = [
            row
            for row in range(first, min(first + self._batch, len(self._rows)))
            if (name, row) not in self._progress.done
        ]
        if not todo:
            return
        rows, runs = len(self._rows), len(self._recipes) + 2  # plain decoding and its samples
        last = min(first + self._batch, rows)
        status(f"{name}: rows {first + 1} to {last} of {rows}", len(self._progress.done), runs * rows)
        outputs = decoder.run(model, tokenizer, [self._rows[row].prompt for row in todo], num_return_sequences=1)
        for row, output in zip(todo, outputs, strict=True):
            self._progress.note(name, row, _noted(output, len(todo), keep=name == POOL))

    def _count(self) -> int:
        """Plain samples that the dearest recipe could have bought."""
        rows = range(len(self._rows))

        def mean(name: str, field: str) -> float:
            return statistics.mean(self._noted(name, row)[field] for row in rows)

        prompt = mean(PLAIN, "prompt_tokens")  # which samples share
        one = max(mean(PLAIN, "forwarded_tokens") - prompt, 1)
        dearest = max(mean(name, "forwarded_tokens") for name in self._recipes)
        return min(MOST_SAMPLES, round((dearest - prompt) / one) + 1)

    def _noted(self, name: str, row: int) -> dict[str, Any]:
        return self._progress.done[name, row]

    def _quality(self, row: int, noted: Mapping[str, Any]) -> float:
        return 0.0 if noted.get("error") else self._metric(noted["text"], self._rows[row].reference)

    def _samples(self, row: int) -> list[dict[str, Any]]:
        return self._progress.done.get((POOL, row), {}).get("samples", [])

    def _price(self, row: int, count: int) -> int:
        """Tokens that so many samples forward; the prompt once."""
        prompt = self._noted(PLAIN, row)["prompt_tokens"]
        return prompt + sum(max(0, sample["tokens"] - 1) for sample in self._samples(row)[:count])

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


def _noted(output: Output, batch: int, *, keep: bool) -> dict[str, Any]:
    stats = output.stats
    noted: dict[str, Any] = {
        "text": output.text,
        "error": output.error,
        "forwards": stats.get("target_forwards", 0),
        "forwarded_tokens": stats.get("forwarded_tokens", 0),
        "prompt_tokens": stats.get("prompt_tokens", 0),
        "tokens": len(output.token_ids),
        # The rows of a batch share its passes: a row's part of the seconds.
        "seconds": (stats.get("prefill_s", 0.0) + stats.get("decode_s", 0.0)) / batch,
        "kv_bytes": stats.get("kv_bytes"),
    }
    if keep:
        noted["samples"] = [
            {"text": own["text"], "tokens": len(own["token_ids"]), "score": own["score"]}
            for own in output.candidates
            if own.get("score") is not None
        ]
    return noted
