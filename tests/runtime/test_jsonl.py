import os

import pytest

from decodekit.core.errors import InputError
from decodekit.runtime.jsonl import Appender, Line, key_of, read_lines, read_results, rewrite


def test_lines_that_are_wrong_stop_no_other() -> None:
    source = [
        b'{"id": "a"}\n',
        b"\xff\n",
        b"\n",
        b'{"id": [1]}\n',
        b"[" * 100_000,
        b'{"id": "1"}',
        b'{"id": 1}',
        b'{"x": 2}',
    ]
    lines = list(read_lines(source, "in"))
    assert [line.number for line in lines if line.error is None] == [1, 6, 7, 8]
    assert [line.id for line in lines if line.error is None] == ["a", "1", 1, 8]
    for line, why in zip(
        (lines[1], lines[2], lines[3]), ("utf-8", "an id is a string", "expected a JSON"), strict=True
    ):
        assert line.error.startswith(f"in:{line.number}: ")
        assert why in line.error


def test_a_number_given_for_a_line_without_id_is_an_id_like_any_other() -> None:
    first, second = read_lines([b'{"id": 2}', b'{"x": 1}'], "in")
    assert first.error is None
    assert "that of line 1" in second.error


def test_a_torn_end_is_cut_off_and_what_was_whole_stays(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    assert read_results(path) == {}
    output = Appender(path)
    output.append({"id": "a", "text": "line\u2028 \ud800"})
    output.append({"id": 2})
    output.close()
    whole = path.read_bytes()
    for torn in (b"{", b'{"id": 3}', b'{"id": 3, "text": "\xe2'):
        path.write_bytes(whole + torn)
        assert list(read_results(path)) == [key_of("a"), key_of(2)]
        assert path.read_bytes() == whole
    path.write_bytes(b"{}\n")
    with pytest.raises(InputError, match=r"out\.jsonl:1: no row of an earlier run"):
        read_results(path)


def test_a_row_that_does_not_fit_leaves_no_part_of_it(tmp_path, monkeypatch) -> None:
    output = Appender(tmp_path / "out.jsonl")
    output.append({"id": 1})
    original = os.write
    monkeypatch.setattr(os, "write", lambda file, data: original(file, data[:5]))
    with pytest.raises(InputError, match="cannot be written"):
        output.append({"id": 2})
    assert (tmp_path / "out.jsonl").read_bytes() == b'{"id": 1}\n'
    with pytest.raises(InputError, match="cannot be written"):
        Appender(tmp_path / "nowhere" / "out.jsonl")


def test_rewriting_is_all_or_nothing(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    rewrite(path, [{"id": 1}])
    with pytest.raises(TypeError):
        rewrite(path, [{"id": 2}, {"id": object()}])
    assert path.read_text() == '{"id": 1}\n'
    assert Line(3, None).id == 3
