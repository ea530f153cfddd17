from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decodekit.core import registry
from decodekit.core.errors import RecipeError
from decodekit.recipe import Recipe, load_recipe, recipe_faults

Write = Callable[..., str]


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def plugin(group: str, spec: Any) -> Any:
    return registry.create(group, spec)


class TestSources:
    def test_yaml(self, write: Write) -> None:
        name = write(a="strategy: dola\nrules: [top_p, {kind: temperature, t: 0.5}]\ngeneration:\n")
        for source in (name, Path(name), Path(name).absolute()):
            recipe = load_recipe(source)
            assert recipe.strategy == plugin("strategies", "dola")
            assert recipe.rules == (plugin("rules", "top_p"), plugin("rules", {"kind": "temperature", "t": 0.5}))

    def test_json(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_text(json.dumps({"generation": {"stop_strings": ["\U0001f600"], "seed": 3}}, indent="\t"))
        assert load_recipe(path).generation.stop_strings == ["\U0001f600"]
        path.write_text('{\n\t"generation": {"seed": -1}\n}')
        assert refusal(path) == f"{path}:2:25: generation.seed: should be greater than or equal to 0, got -1"

    def test_dict(self) -> None:
        assert load_recipe({"generation": {"seed": 3}}).generation.seed == 3
        assert (
            refusal({"generation": {"seed": "3"}})
            == "recipe: generation.seed: should be a number, got the text '3'; leave the quotes out"
        )

    def test_a_key_that_would_break_the_line_is_quoted_and_a_long_one_cut(self) -> None:
        assert refusal({"generation": {"\n": 1}}).startswith("recipe: generation.'\\n': unknown option: ")
        assert refusal({"generation": {"k" * 999: 1}}).startswith(f"recipe: generation.{'k' * 60}...: unknown option: ")

    def test_empty_mapping_is_plain_decoding(self) -> None:
        recipe = load_recipe({})
        assert recipe.strategy == plugin("strategies", "sample")
        assert (recipe.rules, recipe.constraint, recipe.drafter, recipe.fallback) == (None, None, None, "error")
        assert recipe.cache.kind == "paged"
        assert recipe.generation.model_fields_set == set()

    def test_plugins_given_from_python_need_not_be_installed(self) -> None:
        from decodekit.core.protocols import Rule

        class Own(Rule):
            kind: str = "own"
            x: int = 1

            def __call__(self, rows: Any, logits: Any) -> Any: ...

        recipe = load_recipe({"rules": [Own(x=2)]})
        assert recipe.rules == (Own(x=2),)
        assert recipe.to_dict() == {"rules": [{"kind": "own", "x": 2}]}

    def test_recipe_with_overrides(self) -> None:
        recipe = load_recipe({"strategy": {"kind": "dola", "layers": [1, 2]}, "generation": {"seed": 1}})
        changed = load_recipe(recipe, overrides={"strategy": {"early_norm": True}, "generation": {"top_k": 5}})
        assert changed.to_dict() == {
            "strategy": {"kind": "dola", "layers": [1, 2], "early_norm": True},
            "generation": {"seed": 1, "top_k": 5},
        }
        assert load_recipe(recipe) == recipe

    @pytest.mark.parametrize(
        "source",
        [
            {"rules": [{"kind": "bias", "bias": {"a": -1.5}, "budget": "4GiB"}], "cache": "dynamic"},
            {"strategy": {"kind": "mbr", "n": 1, "inner": {"kind": "dola", "layers": "high"}}},
            {"generation": {"sequence_bias": [[[1, 2], -3]], "exponential_decay_length_penalty": [5, 1.1], "top_p": 1}},
            {"constraint": {"kind": "regex", "file": "x.txt"}, "rules": [], "fallback": "eos"},
        ],
    )
    def test_to_dict_makes_an_equal_recipe(self, source: dict[str, Any]) -> None:
        recipe = load_recipe(source)
        again = load_recipe(json.loads(json.dumps(recipe.to_dict())))
        assert again == recipe
        assert again.to_dict() == recipe.to_dict()


@pytest.mark.parametrize(("given", "shown"), [(None, "null"), (3, "3"), (["dola"], "['dola']")])
def test_what_is_no_recipe_is_refused(given: Any, shown: str) -> None:
    assert refusal(given) == f"recipe: should be a recipe file, a mapping or a Recipe, got {shown}"


class TestFiles:
    def test_missing(self, write: Write) -> None:
        write(greedy="{}")
        message = refusal("gredy.yml")
        assert message.startswith("gredy.yml: no such file (relative paths start at ")
        assert refusal("dola").endswith("'dola' is the name of a plugin: write 'strategy: dola' into a recipe file")
        assert refusal("top_p").endswith("write 'rules: [top_p]' into a recipe file")
        assert message.endswith("did you mean 'greedy.yaml'?")
        assert "its folder does not exist" in refusal("nowhere/greedy.yaml")

    def test_not_a_file(self, tmp_path: Path) -> None:
        assert refusal(tmp_path) == f"{tmp_path}: is a directory, not a recipe file"
        os.mkfifo(tmp_path / "pipe")
        assert "is not a regular file" in refusal(tmp_path / "pipe")
        for name in ("a\0b", "x" * 5000):
            assert refusal(name)

    def test_text_in_place_of_a_path(self) -> None:
        assert "give it as a mapping" in refusal("strategy: dola\nrules: []\n")

    def test_unreadable_text(self, write: Write) -> None:
        assert refusal(write(a=b"a: \xff")) == "a.yaml:1:4: not UTF-8 (byte 0xff): save the file as UTF-8"
        assert refusal(write(a="- 1\n")).startswith("a.yaml:1:1: a recipe is a mapping such as")


class TestFaults:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("strategy: dolla", "a.yaml:1:11: strategy.kind: unknown strategy 'dolla': did you mean 'dola'?"),
            ("strategy: {kind: dolla}", "a.yaml:1:18: strategy.kind: unknown strategy 'dolla': did you mean 'dola'?"),
            ("strategy:\n  layers: low", "a.yaml:2:3: strategy: 'kind' should name one of beam, contrast"),
            ("strategy: {kind: 3}", "a.yaml:1:18: strategy.kind: 'kind' should name one of beam"),
            ("strategy: [dola]", "a.yaml:1:11: strategy: should be a kind or a mapping with 'kind', got ['dola']"),
            (
                "strategy: dola\nlayers: low",
                "a.yaml:2:1: layers: no option here: write strategy: {kind: dola, layers: ...} instead",
            ),
            (
                "rules: [{kind: bias}, {kind: top_p, p: 0.9}]\np: 0.8",
                "a.yaml:2:1: p: no option here: write rules: [{kind: top_p, p: ...}] instead",
            ),
            (
                "strategy: dolla\nlayers: low",
                "a.yaml:1:11: strategy.kind: unknown strategy 'dolla': did you mean 'dola'?",
            ),
            ("dola: {layers: low}", "a.yaml:1:1: dola: no option here: write strategy: {kind: dola, ...} instead"),
            ("strategi: dola", "a.yaml:1:1: strategi: unknown option: did you mean 'strategy'?"),
            (f"rules: [{'top_p,' * 101}]", "a.yaml:1:8: rules: should have at most 100 items, got [{'kind': 'top_p'}"),
            (
                "rules: top_p",
                "a.yaml:1:8: rules: should be a list, got 'top_p'; put one rule in brackets, too: [{kind: ...}]",
            ),
            ("rules: [sample]", "a.yaml:1:9: rules.0.kind: unknown rule 'sample': known: bias, temperature, top_p"),
            ("rules:\n- kind: top_p\n  pp: 0.9", "a.yaml:3:3: rules.0.pp: unknown option: did you mean 'p'?"),
            ("rules:\n- kind: top_p\n  p: 1.5", "a.yaml:3:6: rules.0.p: should be less than or equal to 1, got 1.5"),
            ("rules:\n- kind: temperature", "a.yaml:2:3: rules.0.t: missing: this option is required"),
            ("rules: [{kind: temperature, temp: 1}]", "a.yaml:1:29: rules.0.temp: unknown option: known: t"),
            ("rules: [temperature]", "a.yaml:1:9: rules.0.t: missing: this option is required"),
            ("rules: [{kind: temperature, t: hot}]", "a.yaml:1:32: rules.0.t: should be a valid number, got 'hot'"),
            ("rules: [{kind: temperature, t: '0.7'}]", "a.yaml:1:32: rules.0.t: should be a number, got the text"),
            ("rules: [{kind: temperature, t: nan}]", "a.yaml:1:32: rules.0.t: should be greater than 0, got 'nan'"),
            ("rules: [{kind: temperature, t: true}]", "a.yaml:1:32: rules.0.t: should be a number, got true"),
            ("rules: [{kind: bias, top: x}]", "a.yaml:1:27: rules.0.top: should be a valid integer or list, got 'x'"),
            ("rules: [{kind: bias, top: [1, x]}]", "a.yaml:1:31: rules.0.top.1: should be a valid integer, got 'x'"),
            ("rules: [{kind: bias, bias: {5: x}}]", "a.yaml:1:32: rules.0.bias.5: should be a valid number, got 'x'"),
            ("rules: [{kind: bias, words: [verbose]}]", "a.yaml:1:29: rules.0.words: first line second line"),
            ("rules: [{kind: bias, words: [crash]}]", "a.yaml:1:9: rules.0: KeyError while its options were read"),
            ("strategy: {kind: dola, early_norm: yes}", "a.yaml:1:36: strategy.early_norm: should be true or false"),
            ("strategy: {kind: dola, early_norm: 1}", "a.yaml:1:36: strategy.early_norm: should be true or false"),
            (
                "strategy: {kind: dola, layers: mid}",
                "a.yaml:1:32: strategy.layers: should be 'low' or 'high' or a list, got 'mid'",
            ),
            ("strategy:\n  kind: mbr", "a.yaml:2:3: strategy.inner: missing: this option is required"),
            (
                "strategy: {kind: mbr, inner: vote}",
                "a.yaml:1:30: strategy.inner: 'vote' is a SequenceStrategy, not a TokenStrategy",
            ),
            (
                "strategy:\n  kind: mbr\n  inner:\n    kind: dola\n    layrs: low",
                "a.yaml:5:5: strategy.inner.layrs: unknown option: did you mean 'layers'?",
            ),
            (
                "strategy: {kind: mbr, inner: sample, also: [sample, {kind: beam}]}",
                "a.yaml:1:60: strategy.also.1.kind: 'beam' is a SearchStrategy, not a TokenStrategy",
            ),
            ("cache: pages", "a.yaml:1:8: cache.kind: unknown cache 'pages': did you mean 'paged'?"),
            ("cache: {kind: dynamc}", "a.yaml:1:15: cache.kind: unknown cache 'dynamc': did you mean 'dynamic'?"),
            ("cache: {kind: dynamic, size: 3}", "a.yaml:1:24: cache.size: unknown option"),
            ("cache: {}", "a.yaml:1:8: cache: 'kind' should name one of dynamic, paged"),
            ("fallback: no", "a.yaml:1:11: fallback: should be 'error', 'relax', 'eos' or 'raw', got 'no'"),
            ("max_new_tokens: 5", "a.yaml:1:1: max_new_tokens: no option here: write generation: {max_new_tokens: "),
            ("extend: b.yaml", "a.yaml:1:1: extend: no option here: write extends: base.yaml instead"),
            ("generation: 3", "a.yaml:1:13: generation: should be a mapping, got 3"),
            (
                "generation: {max_tokens: 5}",
                "a.yaml:1:14: generation.max_tokens: unknown option: did you mean 'max_new_",
            ),
            ("generation:\n  num_beams: 2", "a.yaml:2:14: generation.num_beams: 2 beams, but strategy 'sample'"),
        ],
    )
    def test_position_and_message(self, write: Write, text: str, message: str) -> None:
        assert refusal(write(a=text)).startswith(message)

    def test_all_in_the_order_of_reading(self, write: Write) -> None:
        write(
            a="extends: b.yaml\ngeneration: {seed: x}\nrules: [{kind: top_p, q: 1}, temperature]\n",
            b="fallback: none\ncache: pages\n",
        )
        name = "a.yaml"
        assert [str(fault).split(": ")[0] for fault in recipe_faults(name)] == [
            "a.yaml:2:20",
            "a.yaml:3:23",
            "a.yaml:3:30",
            "b.yaml:1:11",
            "b.yaml:2:8",
        ]
        assert refusal(name) == str(recipe_faults(name)[0])
        assert recipe_faults({}) == []
        assert len(recipe_faults(write(c="a: ["))) == 1

    def test_default_strategy_not_installed(self, entries: list[Any]) -> None:
        entries[:] = [entry for entry in entries if entry.name != "sample"]
        assert "unknown strategy 'decodekit:sample'" in refusal({})

    def test_plugin_that_fails_to_import(self, write: Write, install: Callable[..., None]) -> None:
        install("rules", "broken", ImportError("no module named x"))
        message = refusal(write(a="rules: [top_p, broken]"))
        assert message.startswith("a.yaml:1:16: rules.1.kind: rules 'broken' of other (other.plugins:broken) failed")

    def test_one_kind_in_two_distributions(self, install: Callable[..., None]) -> None:
        mine = type(plugin("rules", "top_p"))
        install("rules", "top_p", type("TopP", (mine,), {}))
        assert "choose 'decodekit:top_p' or 'other:top_p'" in refusal({"rules": ["top_p"]})
        recipe = load_recipe({"rules": [{"kind": "other:top_p", "p": 0.5}]})
        assert recipe.to_dict() == {"rules": [{"kind": "other:top_p", "p": 0.5}]}
        assert load_recipe(recipe.to_dict()) == recipe

    def test_long_values_are_cut(self) -> None:
        assert len(refusal({"generation": {"seed": "x" * 10_000}})) < 200
        assert len(refusal({"fallback": list(range(10_000))})) < 200


class TestPaths:
    def test_start_at_the_file_that_wrote_them(self, write: Write, tmp_path: Path) -> None:
        write(
            sub__base="constraint: {kind: regex, file: ../lists/x.txt}",
            a="extends: sub/base.yaml",
            b="extends: sub/base.yaml\nconstraint: {file: x.txt}",
        )
        assert load_recipe("a.yaml").constraint.file == tmp_path / "lists/x.txt"  # type: ignore[union-attr]
        assert load_recipe("b.yaml").constraint.file == tmp_path / "x.txt"  # type: ignore[union-attr]
        assert load_recipe("a.yaml").to_dict() == {
            "constraint": {"kind": "regex", "file": str(tmp_path / "lists/x.txt")}
        }
        for recipe in (
            load_recipe("a.yaml", set_values=["constraint.file=y.txt"]),
            load_recipe({"constraint": {"kind": "regex", "file": Path("y.txt")}}),
        ):
            assert recipe.constraint.file == tmp_path / "y.txt"  # type: ignore[union-attr]
        assert load_recipe({"constraint": {"kind": "regex", "file": "/z"}}).constraint.file == Path("/z")  # type: ignore[union-attr]

    def test_path_or_mapping(self, write: Write, tmp_path: Path) -> None:
        write(
            sub__a="constraint: {kind: json_schema, schema: person.json}",
            sub__b="constraint: {kind: json_schema, schema: {type: object}, note: [x]}",
        )
        assert load_recipe("sub/a.yaml").to_dict()["constraint"]["schema"] == str(tmp_path / "sub/person.json")
        assert load_recipe("sub/b.yaml").to_dict()["constraint"] == {
            "kind": "json_schema",
            "schema": {"type": "object"},
            "note": ["x"],
        }


WORDS = ["kind", "dola", "top_p", "rules", "strategy", "generation", "inner", "mbr", "p", "seed", "extends", "a.yaml"]
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.sampled_from(WORDS))
data = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.integers(0, 3), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    source=st.dictionaries(st.sampled_from(WORDS), data, max_size=4),
    path=st.lists(st.sampled_from([*WORDS, "0"]), min_size=1),
)
def test_any_mapping_is_read_or_refused(source: dict[str, Any], path: list[str]) -> None:
    for set_values in ([], [f"{'.'.join(path)}=x"]):
        try:
            recipe = load_recipe(source, set_values=set_values)
        except RecipeError as error:
            message = str(error)
            assert "\n" not in message, message
        else:
            assert isinstance(recipe, Recipe)
            json.dumps(recipe.to_dict(), allow_nan=False)
