"""How much more likely is what beams find than what greedy decoding finds, and what do required words cost?

For each prompt the log-probability a token of greedy decoding, of beams, of diverse beams, and of beams that must hold two
words. Constrained beams pay for the words with likelihood, and always hold them.

    python examples/likely_outputs.py
"""

from __future__ import annotations

import argparse
from statistics import mean

import decodekit
from decodekit.integrations.models import load_model

PROMPTS = [
    "Describe a stormy evening at the coast in one sentence.",
    "Write one sentence about a sailor who comes home.",
]
REQUIRED = ["lighthouse", ["storm", "waves"]]
STRATEGIES = {
    "greedy": {"kind": "sample"},
    "beams": {"kind": "beam", "num_beams": 4},
    "diverse beams": {"kind": "beam", "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "required words": {"kind": "constrained_beam", "num_beams": 8, "phrases": REQUIRED},
}


def main() -> None:
    """Decode every prompt with every strategy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("-m", "--model", help="a Hugging Face id or local folder; the demo model if left out")
    options = parser.parse_args()

    model, tokenizer = load_model(options.model)
    for name, strategy in STRATEGIES.items():
        decoder = decodekit.load({"strategy": strategy, "generation": {"max_new_tokens": options.max_new_tokens}})
        outputs = decoder.run(model, tokenizer, PROMPTS)
        likelihood = mean(mean(output.logprobs) for output in outputs)
        print(f"{name}: {likelihood:.3f} a token; {outputs[0].text!r}", flush=True)


if __name__ == "__main__":
    main()
