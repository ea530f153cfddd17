import pytest

pytestmark = pytest.mark.integration


def test_a_line_a_law_and_the_number_measured(cli, tiny_folder) -> None:
    result = cli("doctor", "-m", tiny_folder)
    assert result.code == 1  # its 97 tokens do not give every text back
    lines = result.out.splitlines()
    assert any(line.startswith("ok") and "cached = uncached" in line and "limit 0.001" in line for line in lines)
    failed = [number for number, line in enumerate(lines) if line.startswith("FAILS")]
    assert "tokens give the text back" in lines[failed[0]]
    assert lines[failed[0] + 1].strip().startswith("do not use: stop_strings")
    assert ["fp8" in lines[failed[1]], "int4" in lines[failed[2]]] == [True, True]  # sharp logits do not bear few bits
    assert "15 of 18 laws hold" in lines[-1]
    result = cli("doctor", "-m", tiny_folder, "--json")
    assert {law["status"] for law in result.json["laws"]} == {"holds", "fails"}
    assert result.json["dtype"] == "float32"


def test_a_model_that_is_not_there_is_one_line(cli) -> None:
    result = cli("doctor", "-m", "./nowhere")
    assert result.code == 2
    assert "nowhere" in result.err
