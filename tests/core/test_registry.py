import importlib.metadata
import sys
from typing import NamedTuple

import pytest

from decodekit.core import registry
from decodekit.core.errors import PluginError, RecipeError
from decodekit.rules.top_k import TopK


class FakeDistribution(NamedTuple):
    name: str
    version: str


class FakeEntry:
    """What importlib.metadata gives for one line of a distribution's entry points."""

    def __init__(self, name: str, value: str, distribution: str, version: str = "1.0") -> None:
        self.name, self.value = name, value
        self.dist = FakeDistribution(distribution, version)

    def load(self):
        module, _, attribute = self.value.partition(":")
        return getattr(importlib.import_module(module), attribute)


@pytest.fixture
def install(monkeypatch):
    """Add entry points to the ones that are installed."""
    real = importlib.metadata.entry_points

    def add(group: str, *entries: FakeEntry) -> None:
        def listed(**selection):
            found = list(real(**selection))
            return found + list(entries) if selection.get("group") == registry.PREFIX + group else found

        monkeypatch.setattr(registry, "entry_points", listed)
        registry._entries.cache_clear()

    yield add
    registry._entries.cache_clear()


def test_create_builds_a_plugin_by_name_and_options() -> None:
    assert registry.create("rules", {"kind": "top_k", "k": 7}) == TopK(k=7)
    assert registry.create("rules", {"kind": "decodekit:top_k", "k": 7}) == TopK(k=7)


def test_nothing_is_imported_until_it_is_named(install) -> None:
    sys.modules.pop("antigravity_plugin", None)
    install("rules", FakeEntry("lazy", "antigravity_plugin:Lazy", "dist-a"))
    assert "lazy" in registry.kinds("rules")
    assert "antigravity_plugin" not in sys.modules


def test_unknown_kind_names_the_nearest(install) -> None:
    with pytest.raises(PluginError, match=r"unknown rule 'top_q': did you mean 'top_p'"):
        registry.create("rules", {"kind": "top_q"})


def test_unknown_group_names_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"unknown plugin group 'rule': did you mean 'rules'"):
        registry.kinds("rule")


def test_unknown_option_and_wrong_value_are_one_line() -> None:
    with pytest.raises(RecipeError, match=r"top_k\.kk: unknown option: did you mean 'k'\? \(known: k\)"):
        registry.create("rules", {"kind": "top_k", "kk": 1})
    with pytest.raises(RecipeError, match=r"top_k\.k: .*greater than or equal to 1, got 0") as caught:
        registry.create("rules", {"kind": "top_k", "k": 0})
    assert "\n" not in str(caught.value)


def test_two_distributions_with_one_name_are_both_named_and_one_can_be_picked(install) -> None:
    install("rules", FakeEntry("top_k", "decodekit.rules.top_p:TopP", "other-dist"))
    with pytest.raises(
        PluginError, match="in decodekit and in other-dist; choose 'decodekit:top_k' or 'other-dist:top_k'"
    ):
        registry.load("rules", "top_k")
    assert registry.load("rules", "decodekit:top_k") is TopK
    assert {row.status for row in registry.inventory() if row.kind == "top_k"} == {"ambiguous"}


def test_a_plugin_that_fails_to_import_is_a_row_and_raises_only_when_used(install) -> None:
    install("rules", FakeEntry("broken", "no_such_module_anywhere:Broken", "dist-a", "2.5"))
    [row] = [row for row in registry.inventory() if row.kind == "broken"]
    assert (row.status, row.distribution, row.version) == ("error", "dist-a", "2.5")
    assert "ModuleNotFoundError" in row.error
    assert registry.create("rules", {"kind": "top_k", "k": 1}) == TopK(k=1)
    with pytest.raises(PluginError, match=r"'broken' of dist-a \(no_such_module_anywhere:Broken\) failed to import"):
        registry.create("rules", {"kind": "broken"})


def test_what_is_not_a_plugin_of_the_group_is_refused(install) -> None:
    install("strategies", FakeEntry("wrong", "decodekit.rules.top_k:TopK", "dist-a"))
    with pytest.raises(PluginError, match="is not a TokenStrategy or SearchStrategy or SequenceStrategy"):
        registry.load("strategies", "wrong")


def test_the_allow_list_limits_what_loads_but_never_the_built_ins(install, monkeypatch) -> None:
    install("rules", FakeEntry("extra", "decodekit.rules.top_p:TopP", "dist-a"))
    monkeypatch.setenv("DECODEKIT_PLUGINS", "dist-b, dist-c")
    with pytest.raises(PluginError, match="'extra' of dist-a may not load: DECODEKIT_PLUGINS allows only"):
        registry.load("rules", "extra")
    assert registry.load("rules", "top_k") is TopK
    assert [row.status for row in registry.inventory() if row.kind == "extra"] == ["not allowed"]
    monkeypatch.setenv("DECODEKIT_PLUGINS", "dist-a")
    assert registry.load("rules", "extra").__name__ == "TopP"


def test_inventory_lists_every_built_in_with_its_cost_and_module() -> None:
    rows = {(row.group, row.kind): row for row in registry.inventory() if row.distribution == "decodekit"}
    assert rows["strategies", "dola"].module == "decodekit.strategies.dola:Dola"
    assert rows["strategies", "dola"].needs == ("hidden_states",)
    assert all(row.status == "ok" and row.cost for row in rows.values())
    assert len(rows) >= 14
