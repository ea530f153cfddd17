"""How often does the first sample pass its tests, and how often the best of n?

A verifier that is right makes best-of-N gain for as long as any sample is right. What the model writes is RUN ON THIS MACHINE:
the unit_tests scorer says what limits it, and what does not.

    python examples/verified_code.py --n 8
"""

from __future__ import annotations

import argparse

import decodekit
from decodekit.integrations.models import load_model

ASK = "Write a Python function {}. Answer with one code block that holds the function alone."
TASKS = {
    "add(a, b) that returns the sum of a and b": ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"],
    "is_even(n) that says whether n is even": ["assert is_even(4)", "assert not is_even(7)"],
    "largest(numbers) that returns the largest of a list": [
        "assert largest([3, 9, 2]) == 9",
        "assert largest([-1]) == -1",
    ],
    "reverse(text) that returns a text backwards": ["assert reverse('abc') == 'cba'", "assert reverse('') == ''"],
}


def main() -> None:
    """Let the tests choose between samples of each function."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=8, help="samples of a function")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    parser.add_argument("-m", "--model", help="a Hugging Face id or local folder; the demo model if left out")
    options = parser.parse_args()

    model, tokenizer = load_model(options.model)
    for task, tests in TASKS.items():
        decoder = decodekit.load(
            {
                "strategy": {"kind": "best_of_n", "n": options.n, "scorer": {"kind": "unit_tests", "tests": tests}},
                "rules": [{"kind": "temperature", "t": 0.8}, {"kind": "top_p", "p": 0.95}],
                "generation": {"do_sample": True, "seed": 0, "max_new_tokens": options.max_new_tokens},
            }
        )
        [best] = decoder.run(model, tokenizer, ASK.format(task))
        scores = [candidate["score"] for candidate in best.candidates]
        passed = f"first {scores[0]:.2f}, mean {sum(scores) / len(scores):.2f}, best {max(scores):.2f}"
        print(f"{task.partition('(')[0]}: share of tests passed: {passed}", flush=True)


if __name__ == "__main__":
    main()
