"""The laws of a strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decodekit.core.protocols import SearchStrategy, SequenceStrategy, TokenStrategy
from decodekit.core.types import Outputs
from decodekit.recipe import Generation, Recipe
from decodekit.runtime.text_call import TextCall
from decodekit.testing.models import Family, tiny_model, tiny_tokenizer
from decodekit.testing.values import broken, check_value

Strategy = TokenStrategy | SearchStrategy | SequenceStrategy

PROMPTS = ("Who won?", "a", "The other one, please: 1 + 2 = ", "Is it so?")


def check_strategy(
    strategy: Strategy,
    *,
    families: Sequence[Family] = ("dense", "sliding", "hybrid"),
    inputs: Mapping[str, Any] | None = None,
    models: Mapping[str, Any] | None = None,
    new_tokens: int = 6,
) -> None:
    """Check the laws that every strategy obeys, on tiny models in float64.

    It is a value. Decoded with left padding in a batch, in any order, each prompt gets the tokens of its solo run; candidates
    of a sequence-level strategy are sampled. Under a token-level strategy rows that end early change no other, and ``score``
    gives a floating-point [P, V], edits nothing it is given, gives the same twice, and a position depends on itself alone:
    not on its neighbours, their order or a NaN among them.

    Args:
        strategy: the strategy.
        families: the tiny models to try.
        inputs: what it must be given for each prompt beyond the text, such as ``{"context": "..."}``.
        models: other models that it needs, by name.
        new_tokens: tokens to decode.

    Raises:
        AssertionError: names the law that does not hold, and where.
    """
    check_value(strategy)
    tokenizer = tiny_tokenizer()
    for family in families:
        model = tiny_model(family, dtype=torch.float64)
        laws = _StrategyLaws(strategy, family, model, tokenizer, inputs or {}, models or {}, new_tokens)
        laws.check_batches()
        if isinstance(strategy, TokenStrategy):
            laws.check_endings()
            laws.check_scores(strategy)


@dataclass(frozen=True)
class _StrategyLaws:
    strategy: Strategy
    family: Family
    model: Any
    tokenizer: Any
    inputs: Mapping[str, Any]
    models: Mapping[str, Any]
    new_tokens: int

    def call(self, prompts: Sequence[str], eos: int | None = None) -> TextCall:
        # Without an EOS id no row ends early, so that every step is compared.
        sample = isinstance(self.strategy, SequenceStrategy)
        generation = Generation(
            max_new_tokens=self.new_tokens,
            suppress_tokens=[self.tokenizer.eos_token_id],
            eos_token_id=eos,
            do_sample=sample,
            seed=0,
        )
        recipe = Recipe(strategy=self.strategy, generation=generation)
        given = [{"prompt": prompt, **self.inputs} for prompt in prompts]
        return TextCall(recipe, self.model, self.tokenizer, given, {}, models=self.models)

    def decode(self, prompts: Sequence[str], eos: int | None = None) -> list[list[int]]:
        call = self.call(prompts, eos)
        for _ in call.run():
            pass
        for index, output in call.outputs():
            if output.error is not None:
                raise self.broken("every prompt is decoded", f"{prompts[index]!r} ended with: {output.error}")
        return [output.token_ids for _, output in call.outputs()]

    def check_batches(self) -> None:
        whole = self.decode(PROMPTS)
        reverse = self.decode(PROMPTS[::-1])[::-1]
        for row, prompt in enumerate(PROMPTS):
            [solo] = self.decode([prompt])
            if whole[row] != solo:
                raise self.broken("batched = alone", f"{prompt!r} gives {whole[row]} in a batch and {solo} alone")
            if reverse[row] != solo:
                raise self.broken(
                    "rows may come in any order", f"{prompt!r} gives {reverse[row]} in reverse order, {solo} alone"
                )

    def check_endings(self) -> None:
        whole = self.decode(PROMPTS)
        for eos in (whole[0][0], whole[-1][self.new_tokens // 2]):
            expected = [tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for tokens in whole]
            found = self.decode(PROMPTS, eos)
            if found != expected:
                raise self.broken(
                    "rows that end early change no other", f"with EOS {eos} {found} instead of {expected}"
                )

    def check_scores(self, strategy: TokenStrategy) -> None:
        call = self.call(PROMPTS)
        for record in call.run():
            self.check_outputs(strategy, record.outputs)

    def check_outputs(self, strategy: TokenStrategy, outputs: Outputs) -> None:
        given = {name: _copy(branch) for name, branch in outputs.items()}
        scores = strategy.score(outputs)
        expected = outputs["main"].logits.shape
        if scores.shape != expected or not scores.is_floating_point():
            raise self.broken(
                "score gives [P, V] floats", f"{tuple(scores.shape)} {scores.dtype} instead of {tuple(expected)}"
            )
        for name, branch in outputs.items():
            for before, after in zip(given[name], _copy(branch), strict=True):
                self.compare(f"outputs of branch {name!r} are not edited", before, after)
        self.compare("the same scores twice", scores, strategy.score(outputs))
        positions = len(scores)
        order = torch.arange(positions).flip(0)
        self.compare("permuted positions give permuted scores", scores[order], strategy.score(_select(outputs, order)))
        for position in range(positions):
            alone = strategy.score(_select(outputs, torch.tensor([position])))
            self.compare(f"a position alone, {position}", scores[position : position + 1], alone)
        poisoned = _select(outputs, torch.arange(positions))
        for branch in poisoned.values():
            branch.logits[0] = math.nan
        self.compare("a NaN harms no other position", scores[1:], strategy.score(poisoned)[1:])

    def compare(self, law: str, expected: Tensor, found: Tensor) -> None:
        # Matrix products of other sizes differ in the last bits.
        if not torch.allclose(expected, found, rtol=1e-9, atol=1e-9, equal_nan=True):
            worst = (expected - found).nan_to_num(0.0, 0.0, 0.0).abs().max()
            raise self.broken(law, f"the results differ by up to {worst:.3g}, or in what is masked")

    def broken(self, law: str, found: str) -> AssertionError:
        return broken(self.strategy, law, f"{found} ({self.family} model)")


def _copy(branch: Any) -> list[Tensor]:
    return [branch.logits.clone(), *(branch.hidden(layer).clone() for layer in branch.layers)]


def _select(outputs: Outputs, index: Tensor) -> Outputs:
    return Outputs({name: branch.select(index) for name, branch in outputs.items()})
