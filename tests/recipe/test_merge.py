from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from decodekit.core import registry
from decodekit.core.errors import RecipeError
from decodekit.recipe import load_recipe, recipe_faults

Write = Callable[..., str]


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def plugin(group: str, spec: Any) -> Any:
    return registry.create(group, spec)


class TestExtends:
    def test_merges(self, write: Write) -> None:
        write(
            base="strategy: {kind: dola, layers: high, early_norm: true}\nrules: [top_p, {kind: temperature, t: 0.5}]\n"
            "generation: {do_sample: true, seed: 1, stop_strings: [a, b], max_time: 3}\nfallback: eos\n",
            a="extends: base.yaml\nstrategy: {layers: [1, 2]}\nrules: [top_p]\n"
            "generation: {seed: 2, stop_strings: [c], max_time: null}\nfallback:\n",
        )
        assert load_recipe("a.yaml").to_dict() == {
            "strategy": {"kind": "dola", "layers": [1, 2], "early_norm": True},
            "rules": [{"kind": "top_p"}],
            "generation": {"do_sample": True, "seed": 2, "stop_strings": ["c"]},
        }

    def test_another_kind_leaves_nothing_behind(self, write: Write) -> None:
        write(
            base="strategy:\n  kind: mbr\n  n: 1\n  inner: {kind: dola, layers: high}",
            a="extends: base.yaml\nstrategy: sample",
            b="extends: base.yaml\nstrategy: {inner: sample}",
            c="extends: base.yaml\nstrategy: {inner: {kind: dola, early_norm: true}}",
        )
        assert load_recipe("a.yaml").to_dict() == {"strategy": {"kind": "sample"}}
        assert load_recipe("b.yaml").to_dict() == {"strategy": {"kind": "mbr", "n": 1, "inner": {"kind": "sample"}}}
        assert load_recipe("c.yaml").to_dict()["strategy"]["inner"] == {
            "kind": "dola",
            "layers": "high",
            "early_norm": True,
        }

    def test_bare_kind_takes_options(self, write: Write) -> None:
        write(base="strategy: dola", a="extends: base.yaml\nstrategy: {layers: high}")
        assert load_recipe("a.yaml").to_dict() == {"strategy": {"kind": "dola", "layers": "high"}}

    def test_later_bases_win(self, write: Write) -> None:
        write(x="generation: {seed: 1, top_k: 1}", y="generation: {seed: 2}", a="extends: [x.yaml, y.yaml]")
        assert load_recipe("a.yaml").to_dict() == {"generation": {"seed": 2, "top_k": 1}}

    def test_paths_start_at_the_file_that_names_them(self, write: Write) -> None:
        write(
            sub__deep__base="generation: {seed: 1}",
            sub__mid="extends: deep/base.yaml\ngeneration: {top_k: 0}",
            other__a="extends: ../sub/mid.yaml",
        )
        assert load_recipe("other/a.yaml").to_dict() == {"generation": {"seed": 1, "top_k": 0}}

    def test_a_fault_is_in_the_file_that_wrote_it(self, write: Write) -> None:
        write(
            sub__base="rules:\n  - kind: top_p\n    p: 3\ngeneration:\n  seed: 1\n",
            a="extends: sub/base.yaml\ngeneration:\n  top_p: 0.5\n  max_new_tokens: 2\n",
            b="extends: a.yaml\nrules: []\ngeneration:\n  min_new_tokens: 5\n",
            c="extends: b.yaml\ngeneration: {min_new_tokens: 1, seed: -1}\n",
            d="extends: c.yaml\ngeneration: {sed: 0}\n",
            e="extends: base2.yaml\nstrategy:\n  n: 3\n",
            base2="strategy:\n  kind: mbr\n",
        )
        assert refusal("a.yaml") == "sub/base.yaml:3:8: rules.0.p: should be less than or equal to 1, got 3"
        assert refusal("b.yaml") == "b.yaml:4:19: generation.min_new_tokens: 5 is more than max_new_tokens: 2"
        assert refusal("c.yaml") == "c.yaml:2:39: generation.seed: should be greater than or equal to 0, got -1"
        assert [str(fault).split(": ")[:2] for fault in recipe_faults("d.yaml")] == [
            ["d.yaml:2:14", "generation.sed"],
            ["c.yaml:2:39", "generation.seed"],
        ]
        assert refusal("e.yaml") == "e.yaml:3:3: strategy.inner: missing: this option is required"

    def test_cycles(self, write: Write) -> None:
        write(a="extends: sub/b.yaml", sub__b="rules: []\nextends: [c.yaml]", sub__c="extends: ../a.yaml")
        write(d="extends: ./d.yaml")
        assert refusal("a.yaml") == (
            "sub/c.yaml:1:10: extends: a recipe cannot extend itself: a.yaml -> sub/b.yaml -> sub/c.yaml -> a.yaml"
        )
        assert refusal("d.yaml") == "d.yaml:1:10: extends: a recipe cannot extend itself: d.yaml -> d.yaml"

    def test_missing_base(self, write: Write) -> None:
        write(base="{}", a="rules: []\nextends: bse.yaml")
        assert refusal("a.yaml").startswith("a.yaml:2:10: extends: bse.yaml: no such file")
        assert refusal("a.yaml").endswith("did you mean 'base.yaml'?")

    @pytest.mark.parametrize("value", ["3", "[b.yaml, 3]", "{a: b}", "''"])
    def test_not_a_path(self, write: Write, value: str) -> None:
        write(b="{}")
        assert "extends: should be a recipe file or a list of them" in refusal(write(x=f"extends: {value}"))

    def test_fan_out_is_bounded(self, write: Write) -> None:
        write(**{f"f{i}": f"extends: [f{i + 1}.yaml, f{i + 1}.yaml]" for i in range(20)}, f20="{}")
        start = time.perf_counter()
        assert "more than 32 files" in refusal("f0.yaml")
        assert time.perf_counter() - start < 2

    def test_in_a_mapping(self, write: Write) -> None:
        write(base="generation: {seed: 1}")
        assert load_recipe({"extends": "base.yaml", "fallback": "raw"}).to_dict() == {
            "fallback": "raw",
            "generation": {"seed": 1},
        }
        assert load_recipe({"extends": None}).to_dict() == {}
        assert refusal({"extends": "bas.yaml"}).startswith("recipe: extends: bas.yaml: no such file")


class TestOverrides:
    def test_merge(self, write: Write) -> None:
        name = write(a="strategy: {kind: dola, layers: high}\ngeneration: {seed: 1, top_k: 3}")
        recipe = load_recipe(name, overrides={"generation": {"seed": 2}, "strategy": {"early_norm": True}})
        assert recipe.to_dict() == {
            "strategy": {"kind": "dola", "layers": "high", "early_norm": True},
            "generation": {"seed": 2, "top_k": 3},
        }
        assert load_recipe(name, overrides={"strategy": "sample"}).strategy == plugin("strategies", "sample")

    def test_origin(self, write: Write) -> None:
        name = write(a="generation: {seed: 1}")
        message = refusal(name, overrides={"generation": {"sed": 2}})
        assert message.startswith("overrides: generation.sed: unknown option")


class TestSet:
    def test_values(self, write: Write) -> None:
        name = write(a="rules: [top_p, {kind: temperature, t: 1}]\ngeneration: {seed: 1}")
        recipe = load_recipe(
            name,
            overrides={"generation": {"seed": 2}},
            set_values=[
                "rules.1.t=0.5",
                "rules.0.p=5e-1",
                "generation.seed = 3",
                "generation.stop_strings=[a, 'b=c']",
                "strategy=dola",
                "strategy.layers=[1, 2]",
                "fallback=eos",
            ],
        )
        assert recipe.to_dict() == {
            "strategy": {"kind": "dola", "layers": [1, 2]},
            "rules": [{"kind": "top_p", "p": 0.5}, {"kind": "temperature", "t": 0.5}],
            "fallback": "eos",
            "generation": {"seed": 3, "stop_strings": ["a", "b=c"]},
        }

    def test_another_kind_replaces(self) -> None:
        source = {"strategy": {"kind": "dola", "layers": "high"}, "rules": ["top_p"]}
        recipe = load_recipe(source, set_values=["strategy.kind=sample", "rules.0={kind: temperature, t: 2}"])
        assert recipe.to_dict() == {"strategy": {"kind": "sample"}, "rules": [{"kind": "temperature", "t": 2.0}]}

    def test_empty_value_takes_back(self) -> None:
        assert load_recipe({"generation": {"seed": 1}}, set_values=["generation.seed="]).to_dict() == {"generation": {}}

    def test_token_ids_as_keys(self) -> None:
        recipe = load_recipe({"rules": ["bias"]}, set_values=["rules.0.bias.50256=-1", "rules.0.bias.a=2"])
        assert recipe.to_dict()["rules"][0]["bias"] == {50256: -1.0, "a": 2.0}

    @pytest.mark.parametrize(
        ("assignment", "message"),
        [
            ("rules.0.p=x", "--set rules.0.p=x: rules.0.p: should be a valid number, got 'x'"),
            ("rules.0.pp=1", "--set rules.0.pp=1: rules.0.pp: unknown option: did you mean 'p'?"),
            ("rules.1.p=1", "--set rules.1.p=1: rules: has no item 1: its only item is 0"),
            ("rules.p=1", "--set rules.p=1: rules: has no item 'p': its only item is 0"),
            ("generation.seed.x=1", "--set generation.seed.x=1: generation.seed: is 1 and has no 'x' inside"),
            ("strategy=dolla", "--set strategy=dolla: strategy.kind: unknown strategy 'dolla': did you mean"),
            ("generation.seed=[1", "--set generation.seed=[1: while parsing a flow sequence"),
            ("generation.seed=.nan", "--set generation.seed=.nan: .nan is no number"),
            ("generation.seed", "--set generation.seed: should be path=value, such as generation.seed=1"),
            ("=3", "--set =3: should be path=value"),
            ("a..b=3", "--set a..b=3: should be path=value"),
            ("extends=b.yaml", "--set extends=b.yaml: extends: cannot be set"),
            ("generatoin.seed=3", "--set generatoin.seed=3: generatoin: unknown option: did you mean 'generation'?"),
        ],
    )
    def test_refusals(self, write: Write, assignment: str, message: str) -> None:
        name = write(a="rules: [top_p]\ngeneration: {seed: 1}")
        assert refusal(name, set_values=[assignment]).startswith(message)

    def test_no_items(self) -> None:
        assert "rules: has no item 0: it is empty" in refusal({"rules": []}, set_values=["rules.0.p=1"])
