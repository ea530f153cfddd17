"""Choose the sample that the other samples agree with most, under a utility (minimum Bayes risk)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from typing_extensions import override

from decodekit.core.candidates import Candidate, Deciding, Decision, gather
from decodekit.core.errors import InputError, RowError
from decodekit.core.protocols import SequenceStrategy, Utility
from decodekit.core.types import Need, Request


class ConfidencePruning(BaseModel):
    """Drop hypotheses that a bootstrap over the first references shows to be hopeless.

    Cheng and Vlachos, 2023, arXiv:2311.14919, algorithm 1. The references come in random order and twice as many each time;
    a hypothesis goes when it beats the leader in at most 1 - confidence of the resampled sets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    confidence: float = Field(0.99, gt=0, lt=1, description="with which a hypothesis is dropped; the paper's alpha")
    first: int = Field(8, ge=1, description="references before the first pruning; twice as many before each next one")
    rounds: int = Field(500, ge=1, description="bootstrap samples of the references")


class Mbr(SequenceStrategy):
    """Minimum Bayes risk decoding: argmax_h sum_r w_r u(h, r).

    Eikema and Aziz, 2020, arXiv:2005.10283, section 5; the samples are hypotheses and pseudo-references at once, each one its
    own reference too. Aggregation: Vamvas and Sennrich, 2024, arXiv:2402.04251. Of equal hypotheses the first wins.

    Helps in open-ended tasks with a metric worth trusting (translation, summaries), where the most likely output is poor; the
    choice is biased towards that metric, and gains flatten after some tens of samples. It needs samples that differ and
    spread around what is right: over peaked or wrong distributions it elects the common error.
    Cost: n + references samples from one prefill, n x (n or references) utilities; linear in n with ``aggregate``.
    """

    cost: ClassVar[str] = "n + references samples, n x max(n, references) utilities"
    needs: ClassVar[frozenset[Need | str]] = frozenset({Need.TOKENIZER})

    kind: Literal["mbr"] = "mbr"
    n: int = Field(16, ge=1, description="hypotheses")
    utility: Utility = Field(description="rates hypotheses against references")
    references: int = Field(
        0, ge=0, description="further samples that are references alone; 0: the hypotheses are their own references"
    )
    weights: Literal["uniform", "probability"] = Field(
        "uniform", description="of the references: all the same, or each different one by its probability"
    )
    aggregate: bool = Field(False, description="one reference of averaged statistics stands for all")
    pruning: ConfidencePruning | None = Field(
        None, description="drop hopeless hypotheses before all utilities are computed"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.aggregate and type(self.utility).aggregated is Utility.aggregated:
            raise ValueError(f"utility {self.utility.kind!r} cannot aggregate its references; leave aggregate out")
        if self.aggregate and self.pruning is not None:
            raise ValueError("aggregate leaves nothing to prune: one reference stands for all; give one of the two")
        return self

    @property
    def count(self) -> int:
        return self.n + self.references

    @override
    def resolve(self, tokenizer: Any) -> Self:
        return self.model_copy(update={"utility": self.utility.resolve(tokenizer)})

    def decide(self, request: Request) -> Deciding:
        candidates = yield from gather(self.count)
        hypotheses = [candidate for candidate in candidates if candidate.id < self.n]
        references = (
            [candidate for candidate in candidates if candidate.id >= self.n] if self.references else hypotheses
        )
        if not hypotheses or not references:
            raise RowError(f"{len(hypotheses)} hypotheses and {len(references)} references came out; both are needed")
        texts = [candidate.text for candidate in hypotheses], [candidate.text for candidate in references]
        weights = probability_weights(references) if self.weights == "probability" else None
        matrix = None
        if self.pruning is not None:
            stream = request.stream
            generator = np.random.default_rng([stream.seed, stream.sample, stream.digest])
            chosen = prune(self.utility, *texts, weights, pruning=self.pruning, generator=generator)
        else:
            values, matrix = _rated(self.utility, *texts, weights, aggregate=self.aggregate)
            chosen = dict(enumerate(values.tolist()))
        ranking = rank(chosen)
        return Decision(
            ranking=[hypotheses[place].id for place in ranking],
            scores={hypotheses[place].id: score for place, score in chosen.items()},
            report={
                "utility": self.utility.kind,
                "expected_utility": chosen[ranking[0]],
                "references": len(references),
                **({"pruned": len(hypotheses) - len(chosen)} if self.pruning is not None else {}),
            },
            details={}
            if matrix is None
            else {
                "utilities": matrix.tolist(),
                "hypothesis_ids": [candidate.id for candidate in hypotheses],
                "reference_ids": [candidate.id for candidate in references],
            },
        )


def expected(
    utility: Utility,
    hypotheses: Sequence[str],
    references: Sequence[str] | None = None,
    weights: Tensor | None = None,
    *,
    aggregate: bool = False,
) -> Tensor:
    """The expected utility of each hypothesis: what a pool of texts is rescored by, without any model.

    Args:
        utility: rates hypotheses against references.
        hypotheses: N texts.
        references: M texts; the hypotheses themselves if left out.
        weights: [M] non-negative; all the same if left out.
        aggregate: against one reference of averaged statistics.

    Returns:
        [N] float64, on the utility's scale. Equal texts have equal values.

    Raises:
        InputError: there is no text, or the weights do not fit the references.
        Refused: the utility cannot aggregate.
    """
    references = hypotheses if references is None else references
    return _rated(utility, hypotheses, references, weights, aggregate=aggregate)[0]


def _rated(
    utility: Utility,
    hypotheses: Sequence[str],
    references: Sequence[str],
    weights: Tensor | None,
    *,
    aggregate: bool,
) -> tuple[Tensor, Tensor | None]:
    """[N] expected utilities, and the [N, M] utilities that they are means of; none where references are aggregated."""
    weights = _normalized(weights, len(references))
    # Every different text once: samples repeat, and equal texts come out exactly equal.
    ours, theirs = list(dict.fromkeys(hypotheses)), list(dict.fromkeys(references))
    rows = [ours.index(text) for text in hypotheses]
    columns = torch.tensor([theirs.index(text) for text in references])
    merged = torch.zeros(len(theirs), dtype=torch.float64).index_add_(0, columns, weights)
    if aggregate:
        return utility.aggregated(ours, theirs, merged)[rows], None
    matrix = utility.pairwise(ours, theirs).to(torch.float64)
    return (matrix @ merged)[rows], matrix[rows][:, columns]


def rank(scores: dict[int, float]) -> list[int]:
    """Hypotheses by score, the best first, and of equal ones the first."""
    return sorted(scores, key=lambda place: (-scores[place], place))


def probability_weights(candidates: Sequence[Candidate]) -> Tensor:
    """[M]: the probability of each output, one that was drawn several times counted once (Jinnai et al., arXiv:2311.05263)."""
    copies = Counter(tuple(candidate.token_ids) for candidate in candidates)
    logprobs = torch.tensor([sum(candidate.logprobs) for candidate in candidates], dtype=torch.float64)
    return logprobs.softmax(0) / torch.tensor([copies[tuple(candidate.token_ids)] for candidate in candidates])


def prune(
    utility: Utility,
    hypotheses: Sequence[str],
    references: Sequence[str],
    weights: Tensor | None = None,
    *,
    pruning: ConfidencePruning,
    generator: np.random.Generator,
) -> dict[int, float]:
    """The hypotheses that are left, with their expected utility over the references that were used.

    Args:
        utility: rates hypotheses against references.
        hypotheses: N texts.
        references: M texts.
        weights: [M] non-negative; all the same if left out.
        pruning: when to drop which.
        generator: shuffles and resamples the references.
    """
    weights = _normalized(weights, len(references))
    order = generator.permutation(len(references)).tolist()
    left, values, used = list(range(len(hypotheses))), torch.zeros(len(hypotheses), 0, dtype=torch.float64), 0
    for size in _schedule(pruning.first, len(references)):
        new = [references[place] for place in order[used:size]]
        values = torch.cat(
            [values, utility.pairwise([hypotheses[place] for place in left], new)], dim=1
        )  # [left, size]
        used = size
        own = weights[order[:size]]
        if size == len(references):
            break
        draws = torch.from_numpy(generator.multinomial(size, np.full(size, 1 / size), size=pruning.rounds)) * own
        means = values @ draws.T  # [left, rounds], each round up to a factor
        leader = int((values @ own).argmax())
        kept = ((means >= means[leader]).to(torch.float64).mean(-1) > 1 - pruning.confidence).nonzero().flatten()
        left, values = [left[place] for place in kept.tolist()], values[kept]
        if len(left) == 1:
            break
    own = weights[order[:used]]
    return dict(zip(left, (values @ own / own.sum()).tolist(), strict=True))


def _schedule(first: int, total: int) -> Iterator[int]:
    size = first
    while size < total:
        yield size
        size *= 2
    yield total


def _normalized(weights: Tensor | None, count: int) -> Tensor:
    if not count:
        raise InputError("there are no references; give at least one text")
    if weights is None:
        return torch.full((count,), 1 / count, dtype=torch.float64)
    weights = weights.to(torch.float64)
    if weights.shape != (count,) or not (weights >= 0).all() or not weights.sum() > 0:
        raise InputError(f"weights should be {count} numbers of at least 0 with a positive sum, got {weights.tolist()}")
    return weights / weights.sum()
