"""Parts of a recipe that are each right and cannot be honoured together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from decodekit.core.protocols import Plugin, SearchStrategy, SequenceStrategy, TokenStrategy
from decodekit.recipe.schema import DynamicSpec, Recipe


class Clash(NamedTuple):
    """The option to change, as a path into the recipe, and one line that says why and to what."""

    path: tuple[str, ...]
    message: str


def innermost(strategy: Plugin) -> Plugin:
    """The strategy at the end of a chain of ``inner``."""
    while isinstance(inner := getattr(strategy, "inner", None), Plugin):
        strategy = inner
    return strategy


def takes_beams(strategy: Plugin) -> bool:
    """Whether ``num_beams`` of ``generate`` means anything to it."""
    return isinstance(strategy, SearchStrategy) and "num_beams" in type(strategy).model_fields


def check_combinations(recipe: Recipe) -> list[Clash]:
    """Every impossible combination of a recipe; empty when it can be honoured."""
    return [clash for check in _CHECKS for clash in check(recipe)]


def _beams(recipe: Recipe) -> Iterator[Clash]:
    strategy, beams = recipe.strategy, recipe.generation.num_beams or 1
    if beams > 1 and not takes_beams(strategy):
        kept = f"{beams} beams, but strategy {strategy.kind!r} keeps one hypothesis a row"
        yield Clash(("generation", "num_beams"), f"{kept}; leave it out or use a beam strategy")


def _copies(recipe: Recipe) -> Iterator[Clash]:
    """Several outputs of a deterministic method would all be the same."""
    strategy, generation = recipe.strategy, recipe.generation
    if generation.do_sample:
        return
    remedy = "the same text each time without sampling; say generation: {do_sample: true}"
    copies = generation.num_return_sequences or 1
    if copies > 1 and isinstance(strategy, TokenStrategy):
        yield Clash(("generation", "num_return_sequences"), f"{copies} outputs of {strategy.kind!r} are {remedy}")
    if isinstance(strategy, SequenceStrategy) and strategy.count > 1:
        yield Clash(("strategy", "n"), f"{strategy.count} outputs of {strategy.inner.kind!r} are {remedy}")


def _chosen(recipe: Recipe) -> Iterator[Clash]:
    """A strategy that decides between outputs returns some of them."""
    strategy, asked = recipe.strategy, recipe.generation.num_return_sequences or 1
    if isinstance(strategy, TokenStrategy):
        return
    most = strategy.width if isinstance(strategy, SearchStrategy) else strategy.count
    if asked > most:
        kept = f"{asked} outputs are more than the {most} that {strategy.kind!r} chooses between"
        yield Clash(("generation", "num_return_sequences"), f"{kept}; ask for fewer, or give it more")


def _sampling(recipe: Recipe) -> Iterator[Clash]:
    strategy = recipe.strategy
    if recipe.generation.do_sample and isinstance(strategy, SearchStrategy) and not strategy.samples:
        yield Clash(("generation", "do_sample"), f"{strategy.kind!r} does not sample; leave it out")


def _forks(recipe: Recipe) -> Iterator[Clash]:
    if isinstance(recipe.cache, DynamicSpec) and not isinstance(recipe.strategy, TokenStrategy):
        yield Clash(
            ("cache",), f"{recipe.strategy.kind!r} forks its rows, which a dynamic cache cannot; leave cache out"
        )


def _drafter(recipe: Recipe) -> Iterator[Clash]:
    if recipe.drafter is None:
        return
    if isinstance(recipe.strategy, SearchStrategy):
        yield Clash(
            ("drafter",), f"drafts for one hypothesis, and {recipe.strategy.kind!r} keeps several; leave it out"
        )
    if isinstance(recipe.cache, DynamicSpec):
        yield Clash(("cache",), "a drafter takes tokens back, which a dynamic cache cannot; leave cache out")
    elif recipe.cache.window is not None:
        yield Clash(
            ("cache", "window"),
            "a drafter verifies several tokens at once, and no mask tells their windows; leave it out",
        )


def _fallback(recipe: Recipe) -> Iterator[Clash]:
    if recipe.fallback == "relax" and not recipe.rules:
        yield Clash(("fallback",), "there are no rules to relax; give rules, or leave fallback out")


def _audit(recipe: Recipe) -> Iterator[Clash]:
    if recipe.audit and getattr(recipe.cache, "window", None) is not None:
        yield Clash(("audit",), "without a cache nothing forgets what a window drops; leave audit or window out")


def _lengths(recipe: Recipe) -> Iterator[Clash]:
    options = recipe.generation
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        low, high = getattr(options, least), getattr(options, most)
        if low is not None and high is not None and low > high:
            yield Clash(("generation", least), f"{low} is more than {most}: {high}")


def _sinks(recipe: Recipe) -> Iterator[Clash]:
    if "sinks" in recipe.cache.model_fields_set and getattr(recipe.cache, "window", None) is None:
        yield Clash(("cache", "sinks"), "has no effect where all tokens are kept; give a window, or leave it out")


def _warpers(recipe: Recipe) -> Iterator[Clash]:
    """Rules replace the sampling warpers of generate, and with them the options that set those."""
    if recipe.rules is None:
        return
    for option in ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"):
        if getattr(recipe.generation, option) is not None:
            yield Clash(("generation", option), "has no effect beside rules, which replace it; write it as a rule")


_CHECKS = (_beams, _copies, _chosen, _sampling, _forks, _drafter, _fallback, _audit, _lengths, _sinks, _warpers)
