"""Counts of n-grams and what two texts share of them, each text counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Counts = Mapping[Hashable, float]


def count_ngrams(items: Sequence[Hashable], order: int) -> Counter[Hashable]:
    """How often each n-gram of this order occurs; of a string, its substrings."""
    return Counter(
        items[start : start + order] if isinstance(items, str) else tuple(items[start : start + order])
        for start in range(len(items) - order + 1)
    )


def mean_counts(counts: Iterable[Counts], weights: Sequence[float]) -> dict[Hashable, float]:
    """The weighted mean of several texts' counts; the weights sum to one."""
    mean: dict[Hashable, float] = {}
    for own, weight in zip(counts, weights, strict=True):
        for ngram, count in own.items():
            mean[ngram] = mean.get(ngram, 0.0) + weight * count
    return mean


def shared_count(one: Counts, other: Counts) -> float:
    """The n-grams that two texts share, each as often as it occurs in both."""
    return sum(min(count, other.get(ngram, 0)) for ngram, count in one.items())


def shared_counts(hypotheses: Sequence[Counts], references: Sequence[Counts]) -> Tensor:
    """[N, M] float64: ``shared_count`` of each pair of texts with whole counts, as one matrix product.

    The k-th occurrence of an n-gram is an item of its own, so that two texts share as many items as the smaller count says.
    """
    known: dict[tuple[Hashable, int], int] = {}
    ours, theirs = ([_items(counts) for counts in texts] for texts in (hypotheses, references))
    for text in ours:
        for item in text:
            known.setdefault(item, len(known))

    def incidence(texts: Sequence[Sequence[tuple[Hashable, int]]]) -> Tensor:
        places = [(row, known[item]) for row, text in enumerate(texts) for item in text if item in known]
        dense = torch.zeros(len(texts), len(known))  # float32 holds the counts of any text exactly
        dense[tuple(torch.tensor(places, dtype=torch.long).reshape(-1, 2).T)] = 1
        return dense

    return (incidence(ours) @ incidence(theirs).T).to(torch.float64)


def _items(counts: Counts) -> list[tuple[Hashable, int]]:
    return [(ngram, occurrence) for ngram, count in counts.items() for occurrence in range(int(count))]


@dataclass(frozen=True)
class ChrF:
    """The character n-gram F-score of sentences, on the scale of 0 to 100.

    Popović, 2015, aclanthology.org/W15-3049; with words (chrF++) Popović, 2017, aclanthology.org/W17-4770. As sacrebleu
    computes it: white space is no character, orders that one of the texts is too short for do not count.

    Attributes:
        char_order: longest n-grams of characters.
        word_order: longest n-grams of words; 0 for none.
        beta: how many times more recall counts than precision.
    """

    char_order: int = 6
    word_order: int = 0
    beta: float = 2.0

    def pairwise(self, hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
        """[N, M] float64."""
        return self.score(self.statistics(hypotheses, references))

    def statistics(self, hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
        """[3, orders, N, M] float64: n-grams that are shared, of the hypothesis, of the reference; each text is read once.

        Summed over sentences they give the score of a corpus.
        """
        known = {text: self._counts(text) for text in (*hypotheses, *references)}
        ours, theirs = [known[text] for text in hypotheses], [known[text] for text in references]
        orders = range(self.char_order + self.word_order)
        shared = torch.stack([shared_counts([own[n] for own in ours], [own[n] for own in theirs]) for n in orders])
        totals = _totals(ours).unsqueeze(-1), _totals(theirs).unsqueeze(-2)
        return torch.stack([shared, *(total.expand_as(shared) for total in totals)])

    def score(self, statistics: Tensor) -> Tensor:
        """Of [3, orders, ...] counts, [...] scores."""
        shared, ours, theirs = statistics
        counted = (ours > 0) & (theirs > 0)
        orders = counted.sum(0).clamp(min=1)
        precision = (shared / ours.clamp(min=1e-16)).where(counted, 0.0).sum(0) / orders
        recall = (shared / theirs.clamp(min=1e-16)).where(counted, 0.0).sum(0) / orders
        factor = self.beta**2
        return 100 * (1 + factor) * precision * recall / (factor * precision + recall).clamp(min=1e-16)

    def aggregated(self, hypotheses: Sequence[str], references: Sequence[str], weights: Tensor) -> Tensor:
        """[N] float64 against the mean counts of all references (Vamvas and Sennrich, 2024, arXiv:2402.04251)."""
        ours = [self._counts(text) for text in hypotheses]
        counts = [self._counts(text) for text in references]
        mean = [mean_counts(order, weights.tolist()) for order in zip(*counts, strict=True)]
        shared = [[shared_count(own[order], mean[order]) for own in ours] for order in range(len(mean))]
        counts_of_all = torch.tensor(shared, dtype=torch.float64), _totals(ours), _totals([mean]).expand(-1, len(ours))
        return self.score(torch.stack(counts_of_all))

    def _counts(self, text: str) -> list[Counter[Hashable]]:
        """Counts of every order."""
        characters = "".join(text.split())
        counts = [count_ngrams(characters, order + 1) for order in range(self.char_order)]
        words = _words(text) if self.word_order else []
        return counts + [count_ngrams(words, order + 1) for order in range(self.word_order)]


def _totals(texts: Sequence[Sequence[Counts]]) -> Tensor:
    """[orders, texts] n-grams in all."""
    totals = [[sum(counts.values()) for counts in orders] for orders in texts]
    return torch.tensor(totals, dtype=torch.float64).mT


_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def _words(text: str) -> list[str]:
    """Words, one mark of punctuation at their end, or else at their beginning, set apart."""
    words = []
    for word in text.split():
        if len(word) > 1 and word[-1] in _PUNCTUATION:
            words += [word[:-1], word[-1]]
        elif len(word) > 1 and word[0] in _PUNCTUATION:
            words += [word[0], word[1:]]
        else:
            words.append(word)
    return words
