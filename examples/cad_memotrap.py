"""Does context-aware decoding make a model do as it is told, against a proverb that it knows by heart?

MemoTrap (Liu and Liu, 2023, https://github.com/liujch1998/memo-trap) asks for a well-known quote with another last word and
compares the probabilities of two endings: the one that was asked for, and the one that was memorized. The instruction is the
context. Accuracy of plain decoding and of CAD, and their difference with a 95 % interval over the questions.

    python examples/cad_memotrap.py memotrap.jsonl --alpha 1 --limit 400

DATA has a line a question: {"task", "prompt", "classes": [text, text], "answer": index}.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import decodekit
from decodekit.integrations.models import load_model


def main() -> None:
    """Score every question with both decoders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--task", default="1-proverb-ending")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--limit", type=int, help="use the first N questions of the task")
    parser.add_argument("-m", "--model", help="a Hugging Face id or local folder; the demo model if left out")
    options = parser.parse_args()

    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").rstrip("\n").split("\n")]
    rows = [row for row in rows if row["task"] == options.task][: options.limit]
    model, tokenizer = load_model(options.model)
    decoders = {"plain": decodekit.load({}), "cad": decodekit.strategy("cad", alpha=options.alpha)}
    right: dict[str, list[bool]] = {name: [] for name in decoders}
    for number, row in enumerate(rows, 1):
        # The instruction ends at the first colon: Write a quote that ends in the word "early": Better late than
        instruction, colon, _ = row["prompt"].partition(": ")
        prompt = {"prompt": row["prompt"], "context": instruction + colon.rstrip()}
        for name, decoder in decoders.items():
            scores = [sum(own) for own in decoder.score(model, tokenizer, prompt, row["classes"], raw=True)]
            right[name].append(scores.index(max(scores)) == row["answer"])
        if number % 20 == 0 or number == len(rows):
            report(right)


def report(right: dict[str, list[bool]]) -> None:
    """The figures so far, on a line."""
    gains = [cad - plain for cad, plain in zip(right["cad"], right["plain"], strict=True)]
    half = 1.96 * statistics.stdev(gains) / math.sqrt(len(gains))
    accuracies = ", ".join(f"{name} {statistics.mean(answers):.4f}" for name, answers in right.items())
    print(f"{len(gains)} questions: {accuracies}, gain {statistics.mean(gains):+.4f} +- {half:.4f}", flush=True)


if __name__ == "__main__":
    main()
