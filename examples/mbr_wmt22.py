"""Does minimum Bayes risk over the outputs of several systems translate better than any one of the systems?

For each sentence the candidates are the translations of the systems that took part in WMT22; the choice sees these alone.
Corpus
chrF of the choice against the first human reference, beside the mean system and the best one, with 95 % intervals of the
differences from a paired bootstrap over the sentences (Koehn, 2004, aclanthology.org/W04-3250). No model is run.

    python examples/mbr_wmt22.py wmt22_de-en.jsonl --utility chrf

DATA has a line a sentence: {"src", "refs": [text, ...], "candidates": [text of system 1, text of system 2, ...]}.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from decodekit.core.ngrams import ChrF
from decodekit.core.registry import create
from decodekit.strategies.mbr import expected, rank


def main() -> None:
    """Choose a candidate of every sentence, and compare with the systems."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--utility", default="chrf", help="by which the choice is made")
    parser.add_argument("--aggregate", action="store_true")
    parser.add_argument("--rounds", type=int, default=1000, help="of the bootstrap")
    options = parser.parse_args()

    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").rstrip("\n").split("\n")]
    utility, chrf = create("utilities", options.utility), ChrF()
    statistics = []
    for row in rows:
        candidates = row["candidates"]
        chosen = rank(dict(enumerate(expected(utility, candidates, aggregate=options.aggregate).tolist())))[0]
        statistics.append(chrf.statistics([candidates[chosen], *candidates], row["refs"][:1]).squeeze(-1))
    counts = torch.stack(statistics, dim=2)  # [3, orders, sentences, 1 + systems], the choice first

    [ours, *systems] = chrf.score(counts.sum(2)).tolist()
    best = systems.index(max(systems))
    print(f"{len(rows)} sentences, {len(systems)} systems, MBR by {options.utility}: chrF {ours:.2f}")
    generator = np.random.default_rng(0)
    even = np.full(len(rows), 1 / len(rows))
    draws = torch.from_numpy(generator.multinomial(len(rows), even, size=options.rounds)).to(torch.float64)
    redrawn = chrf.score(torch.einsum("kosc,rs->korc", counts, draws))
    peers = {
        "mean system": (sum(systems) / len(systems), redrawn[:, 1:].mean(-1)),
        f"best system ({best})": (systems[best], redrawn[:, 1 + best]),
    }
    for name, (score, drawn) in peers.items():
        low, high = (redrawn[:, 0] - drawn).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        print(f"{name}: {score:.2f}; gain {ours - score:+.2f} [{low:+.2f}, {high:+.2f}]")


if __name__ == "__main__":
    main()
