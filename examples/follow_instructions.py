"""Do guidance and context-aware decoding keep to an instruction better than greedy decoding?

Each instruction can be checked. Classifier-free guidance pushes away from the answer to the bare question, context-aware
decoding takes the instruction as the context; both decode a second branch without it.

    python examples/follow_instructions.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import decodekit
from decodekit.integrations.models import load_model

INSTRUCTIONS: dict[str, Callable[[str], bool]] = {
    "Answer in capital letters only.": str.isupper,
    "Answer in lower case only.": str.islower,
    "Answer in one short sentence.": lambda text: len(text.split()) <= 15,
    "Begin the answer with the word Well.": lambda text: text.startswith("Well"),
}
QUESTIONS = ["What is the capital of France?", "Why is the sky blue?", "Name an animal that can fly."]


def main() -> None:
    """Ask every question under every instruction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=30)
    parser.add_argument("-m", "--model", help="a Hugging Face id or local folder; the demo model if left out")
    options = parser.parse_args()

    model, tokenizer = load_model(options.model)
    asked = [(instruction, question) for instruction in INSTRUCTIONS for question in QUESTIONS]
    prompts = [
        {"prompt": f"{instruction} {question}", "context": instruction, "negative_prompt": question}
        for instruction, question in asked
    ]
    for strategy in ({"kind": "sample"}, {"kind": "cfg", "guidance_scale": 1.5}, {"kind": "cad", "alpha": 0.5}):
        decoder = decodekit.load({"strategy": strategy, "generation": {"max_new_tokens": options.max_new_tokens}})
        texts = [output.text.strip() for output in decoder.run(model, tokenizer, prompts)]
        kept = sum(INSTRUCTIONS[instruction](text) for (instruction, _), text in zip(asked, texts, strict=True))
        print(f"{strategy['kind']}: {kept} of {len(texts)} kept; {texts[0]!r}", flush=True)


if __name__ == "__main__":
    main()
