"""The faults can all be put in, are taken out again, and the runner tells which ones tests notice."""

import pytest
import torch

from decodekit.rules.temperature import Temperature
from decodekit.testing import check_rule, make_rows
from decodekit.testing.mutants import Mutant, planted
from decodekit.testing.mutants.__main__ import main
from decodekit.testing.mutants.faults import FAULTS
from decodekit.testing.mutants.plugins import faults_of, spoiled


def test_every_fault_has_its_line_and_its_tests() -> None:
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) >= 40
    for fault in FAULTS:
        with planted(fault):
            pass
        assert fault.mirrored


def test_a_fault_is_there_for_who_holds_the_function_already_and_gone_afterwards() -> None:
    rule, logits = Temperature(t=2.0), torch.tensor([[4.0, 2.0]])
    call = rule.__call__
    with planted(FAULTS[0]):
        assert call(make_rows([[3]]), logits).tolist() == [[8.0, 4.0]]
    assert call(make_rows([[3]]), logits).tolist() == [[2.0, 1.0]]


def test_a_line_that_has_changed_is_named() -> None:
    wrong = Mutant("gone", "decodekit.rules.temperature:Temperature.__call__", "no such line", "")
    with pytest.raises(ValueError, match="'gone': 'no such line' is 0 times in"), planted(wrong):
        pass


@pytest.mark.parametrize("name", [name for name in faults_of(Temperature) if name not in ("nothing is changed",)])
def test_the_laws_of_a_rule_notice_what_any_rule_can_have(name) -> None:
    """Those that change what a rule does at all are for its own tests."""
    harmless = {"the history is a token short", "the prompt counts as output", "all rows draw alike"}
    with spoiled(Temperature, name):
        if name in harmless | {"what lies beyond a history is read"}:
            check_rule(Temperature(t=2.0))  # it reads no history and draws nothing
        else:
            with pytest.raises((AssertionError, RuntimeError)):
                check_rule(Temperature(t=2.0))
    check_rule(Temperature(t=2.0))


def test_the_runner_counts_what_is_noticed(tmp_path, capfd) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        "import torch\nfrom decodekit.rules.temperature import Temperature\nfrom decodekit.testing import make_rows\n"
        "def test_it():\n    assert Temperature(t=2.0)(make_rows([[3]]), torch.ones(1, 2)).tolist() == [[0.5, 0.5]]\n"
    )
    assert main(["-k", "temperature multiplies", "--", str(test)]) == 0
    assert main(["-k", "top-k keeps one less", "--", str(test)]) == 1
    out = capfd.readouterr().out
    assert "noticed  temperature multiplies" in out
    assert "MISSED   top-k keeps one less" in out
    assert "1 of 1 faults were noticed (100.0%)" in out
    assert main(["-k", "no fault of this name"]) == 2
