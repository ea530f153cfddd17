import json

import pytest

from decodekit.testing.mutants import planted
from decodekit.testing.mutants.faults import FAULTS
from decodekit.testing.soak import RECIPES, main, soak

pytestmark = pytest.mark.integration


def test_requests_of_all_kinds_leave_nothing_behind() -> None:
    report = soak(requests=70)
    assert report.mismatches == []
    assert report.leaked_blocks == 0
    assert report.requests.keys() >= {*RECIPES, "left early", "exhausted", "broken: interrupt", "reset"}
    assert report.tokens > 300
    assert report.usable_s > 0


def test_the_report_is_json(capsys) -> None:
    main(["--minutes", "0.01"])
    assert json.loads(capsys.readouterr().out)["mismatches"] == []


def test_a_fault_is_seen() -> None:
    [fault] = [own for own in FAULTS if own.name == "rejected tokens stay in the cache"]
    with planted(fault):
        assert any(own.startswith("drafts") for own in soak(requests=40).mismatches)
