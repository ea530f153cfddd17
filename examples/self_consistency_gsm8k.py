"""Does a vote over several samples solve more school sums than greedy decoding?

GSM8K (Cobbe et al., 2021, arXiv:2110.14168). Accuracy of greedy decoding and of self-consistency, and their difference, each
with a 95 % interval over the questions. The same model, prompt and extractor; right is the number alone.

    python examples/self_consistency_gsm8k.py gsm8k.jsonl --n 8 --limit 50

DATA has a line a question: {"question", "final"}.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import decodekit
from decodekit.integrations.models import load_model
from decodekit.strategies.self_consistency.extractors import LastNumber, canonical

ASK = "\nThink step by step. End with a line: The answer is NUMBER"


def main() -> None:
    """Answer every question with both decoders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--n", type=int, default=8, help="samples of a question")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--batch", type=int, default=10, help="questions that are decoded side by side")
    parser.add_argument("--limit", type=int, help="use the first N questions")
    parser.add_argument("-m", "--model", help="a Hugging Face id or local folder; the demo model if left out")
    options = parser.parse_args()

    lines = options.data.read_text(encoding="utf-8").rstrip("\n").split("\n")[: options.limit]
    questions = [json.loads(line) for line in lines]
    model, tokenizer = load_model(options.model)
    length = {"max_new_tokens": options.max_new_tokens}
    vote = decodekit.load(
        {
            "strategy": {"kind": "self_consistency", "n": options.n},
            "rules": [{"kind": "temperature", "t": options.temperature}],
            "generation": {"do_sample": True, "seed": 0, **length},
        }
    )
    greedy = decodekit.load({"generation": {"do_sample": False, **length}})
    right: dict[str, list[bool]] = {"greedy": [], f"vote of {options.n}": []}
    for start in range(0, len(questions), options.batch):
        rows = questions[start : start + options.batch]
        prompts = [row["question"] + ASK for row in rows]
        for name, decoder in zip(right, (greedy, vote), strict=True):
            outputs = decoder.run(model, tokenizer, prompts)
            right[name] += [
                LastNumber()(output.text) == canonical(row["final"]) for output, row in zip(outputs, rows, strict=True)
            ]
        print(
            f"{len(right['greedy'])} questions: { ({name: sum(own) for name, own in right.items()}) } right", flush=True
        )

    first, second = right.values()
    for name, answers in right.items():
        show(name, answers)
    show("gain", [float(later) - earlier for earlier, later in zip(first, second, strict=True)])


def show(name: str, values: Sequence[float]) -> None:
    """The mean with its 95 % interval."""
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    print(f"{name}: {statistics.mean(values):.3f} +- {half:.3f} ({len(values)} questions)")


if __name__ == "__main__":
    main()
