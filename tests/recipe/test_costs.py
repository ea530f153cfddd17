"""What check says of a recipe's cost, beside what a run counts; over the plugins that are installed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from decodekit.core import registry
from decodekit.core.protocols import TokenStrategy
from decodekit.core.types import Branch, Outputs, Request
from decodekit.recipe import Generation, Recipe
from decodekit.recipe.costs import cost_of
from decodekit.runtime.decoder import Decoder


@pytest.fixture(autouse=True)
def _installed() -> None:
    """The real plugins, not those of conftest."""


class Doubled(TokenStrategy):
    """Two branches of the same length."""

    kind: str = "doubled"
    needs: ClassVar[frozenset[str]] = frozenset({"other"})

    def branches(self, request: Request) -> tuple[Branch, ...]:
        request.require("other", self.kind)
        return Branch("main", request.prompt_ids), Branch("other", request.prompt_ids[::-1])

    def score(self, outputs: Outputs) -> Any:
        return 2 * outputs["main"].logits - outputs["other"].logits


class Picky(Doubled):
    def branches(self, request: Request) -> tuple[Branch, ...]:
        raise ValueError("this prompt will not do")


def nested(n: int, inner: TokenStrategy) -> Recipe:
    strategy = registry.create("strategies", {"kind": "mbr", "n": n, "utility": "exact", "inner": inner})
    # No row ends early, so that the most that check announces is what a run takes.
    generation = Generation(do_sample=True, seed=0, max_new_tokens=6, suppress_tokens=[1])
    return Recipe(strategy=strategy, generation=generation)


@pytest.mark.parametrize(
    ("recipe", "tokens", "text"),
    [
        (Recipe(), 1, "1 forwarded token a token of output"),
        (Recipe(strategy=Doubled()), 2, "up to 2 forwarded tokens a token of output: 2 branches"),
        (nested(8, Doubled()), 16, "up to 16 forwarded tokens a token of output: 8 candidates x 2 branches"),
        (nested(1, Doubled()), 2, "up to 2 forwarded tokens a token of output: 2 branches"),
    ],
)
def test_multiplies_what_is_nested(recipe: Recipe, tokens: int, text: str) -> None:
    assert cost_of(recipe).forwarded_tokens == tokens
    assert str(cost_of(recipe)) == text


@pytest.mark.parametrize(
    ("kind", "options", "branches"),
    [
        ("dola", {}, 1),
        ("cad", {}, 2),
        ("cfg", {}, 2),
        ("contrastive_decoding", {"amateur": "small"}, 2),
        ("contrastive_decoding", {"amateur": {"layers": 2}}, 1),
        ("dexperts", {"expert": "one", "antiexpert": "other"}, 3),
        ("instructive", {}, 2),
        ("sled", {}, 1),
    ],
)
def test_knows_the_branches_of_every_strategy_that_ships(kind: str, options: dict[str, Any], branches: int) -> None:
    strategy = registry.create("strategies", {"kind": kind, **options})
    assert cost_of(Recipe(strategy=strategy)).forwarded_tokens == branches
    assert cost_of(nested(5, strategy)).forwarded_tokens == 5 * branches
    assert not cost_of(nested(5, strategy)).unknown


def test_says_where_the_branches_depend_on_the_prompt() -> None:
    text = "up to 4 forwarded tokens a token of output: 4 candidates x the branches of 'doubled'"
    assert str(cost_of(nested(4, Picky()))) == text


@pytest.mark.integration
@pytest.mark.parametrize("n", [1, 3])
def test_a_run_forwards_as_many(model: Any, tokenizer: Any, n: int) -> None:
    recipe = nested(n, Doubled())
    prompts = [{"prompt": text, "other": "x"} for text in ("Who won?", "ab")]
    for output, prompt in zip(Decoder(recipe).run(model, tokenizer, prompts), prompts, strict=True):
        length = len(tokenizer(prompt["prompt"]).input_ids)
        # The last token of a row is never forwarded, the prompt once a branch.
        assert output.stats["forwarded_tokens"] == 2 * length + cost_of(recipe).forwarded_tokens * (6 - 1)
