"""How much do greedy decoding, contrastive search, contrastive decoding and sampling repeat themselves?

For each the share of words that stand in a run of four that occurred before (rep-4, Welleck et al., 2019, arXiv:1908.04319),
over a few openings, and the beginning of one text.

    python examples/open_ended_text.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

import decodekit
from decodekit.integrations.models import load_model

OPENINGS = [
    "The old lighthouse keeper climbed the stairs and",
    "In the middle of the forest there was",
    "The city at night",
]
RECIPES = Path(__file__).parent / "recipes"


def main() -> None:
    """Continue every opening with every recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("-m", "--model", help="a Hugging Face id or local folder; the demo model if left out")
    options = parser.parse_args()

    model, tokenizer = load_model(options.model)
    for name in ("greedy", "contrastive_search", "contrastive_decoding", "nucleus"):
        decoder = decodekit.load(RECIPES / f"{name}.yaml", generation={"max_new_tokens": options.max_new_tokens})
        texts = [output.text for output in decoder.run(model, tokenizer, OPENINGS, raw=True)]
        print(f"{name}: rep-4 {mean(map(repetition, texts)):.2f}; {OPENINGS[0]}{texts[0][:120]!r}", flush=True)


def repetition(text: str, length: int = 4) -> float:
    """The share of runs of words that occurred before."""
    words = text.split()
    runs = [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]
    return 1 - len({*runs}) / len(runs) if runs else 0.0


if __name__ == "__main__":
    main()
