from __future__ import annotations

import json
import math
import re

import pytest

from vescale_ckpt.errors import CorruptionError, MismatchError
from vescale_ckpt.geometry.box import Box
from vescale_tools import output as output_module
from vescale_tools.output import (
    Output,
    count,
    format_bytes,
    format_seconds,
    format_time,
    iso_time,
    one_line,
    percent,
    plain_json,
    printable,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9999, "10.0 kB"),
        (99_949, "99.9 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (90_856_960, "90.9 MB"),
        (5 * 10**12, "5.00 TB"),
        (2**80, "1208926 EB"),
    ],
)
def test_bytes_have_three_digits(number, text):
    assert format_bytes(number) == text


def test_times_are_in_utc():
    assert format_time(0.9) == "1970-01-01 00:00:00"
    assert iso_time(1_700_000_000.5) == "2023-11-14T22:13:20+00:00"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.234, "1.23 s"), (90, "90 s"), (120, "2 min"), (3600, "1 h"), (86400, "1 d"), (172800, "2 d")],
)
def test_time_spans(seconds, text):
    assert format_seconds(seconds) == text


def test_parts():
    assert [percent(1, 3), percent(2, 2), percent(0, 0)] == ["33.3 %", "100 %", "0 %"]


def test_counting_needs_a_terminal(capsys, monkeypatch):
    with Output().counting("work") as progress:
        progress("things", 3)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with Output(as_json=True).counting("work [x]") as progress:
        progress("things", 3)
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "work [x]" in streams.err


def test_counts():
    assert [count(n, "tensor") for n in (0, 1, 2000)] == ["0 tensors", "1 tensor", "2,000 tensors"]


def test_nothing_reaches_the_terminal_that_could_command_it():
    text = "a\x1b[31m\r\nb\x9b\u202e\x7f\u2028ä[0]*"
    assert printable(text) == r"a\x1b[31m\r\nb\x9b\u202e\x7f\u2028ä[0]*"


def test_messages_of_several_lines_become_one():
    assert one_line("a\n  b\n\nc") == "a; b; c"


def test_json_is_made_of_what_json_has():
    value = {"a": (1, True, None), 2: {"x"}, "box": Box((0,), (1,)), "nan": math.nan, "inf": -math.inf, "f": 1.5}
    plain = plain_json(value)
    assert plain == {
        "a": [1, True, None],
        "2": ["x"],
        "box": "Box(offset=(0,), shape=(1,))",
        "nan": "nan",
        "inf": "-inf",
        "f": 1.5,
    }
    json.dumps(plain, allow_nan=False)


ROWS = [["a", "1", ""], ["[red]long name[/red]" * 10, "22", "x"]]


def test_tables_are_plain_and_unwrapped_where_nobody_looks(capsys):
    Output().table(("name", "n", "note"), ROWS, right=("n",))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["a", "1"]
    assert lines[1] == lines[1].rstrip()
    assert lines[2].startswith("[red]long name[/red]")
    assert lines[0].index(" n ") + 1 == lines[1].index("1") == lines[2].index("22") + 1
    assert lines[2].endswith("22  x")


def test_tables_on_a_terminal_show_every_letter(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    Output().table(("name", "n", "note"), [["a[0]", "1", ""], ["b" * 100, "22", "x"]], right=("n",))
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "a[0]" in out
    assert out.count("b") == 100


def test_with_json_there_is_one_object_and_nothing_else(capsys):
    output = Output(as_json=True)
    output.line("for people")
    output.table(("a",), [["b"]])
    output.warn("careful")
    output.emit({"x": 1})
    streams = capsys.readouterr()
    assert json.loads(streams.out) == {"x": 1}
    assert streams.err == "vescale-ckpt: warning: careful\n"


def test_without_json_there_is_no_object(capsys):
    Output().emit({"x": 1})
    assert capsys.readouterr().out == ""


def test_progress_needs_a_terminal(capsys, monkeypatch):
    with Output().progress("reading", 100) as advance:
        advance(50)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with Output(as_json=True).progress("reading [x]", 100) as advance:
        advance(100)
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "reading [x]" in streams.err


def test_an_error_is_one_line_and_one_object(capsys):
    error = CorruptionError("bad\nbytes \x1b", key="packs/x", box=Box((0,), (1,)), step=3)
    Output(as_json=True).fail(error)
    streams = capsys.readouterr()
    assert streams.err == "vescale-ckpt: error: bad; bytes \\x1b\n"
    assert json.loads(streams.out) == {
        "error": {
            "kind": "corruption",
            "message": "bad\nbytes \x1b",
            "context": {"key": "packs/x", "box": "Box(offset=(0,), shape=(1,))", "step": 3},
        }
    }


def test_problems_are_part_of_the_object(capsys):
    Output(as_json=True).fail(MismatchError("2 problems", problems=("a", "b")))
    assert json.loads(capsys.readouterr().out)["error"]["context"] == {"problems": ["a", "b"]}


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (KeyboardInterrupt(), "interrupted", "interrupted"),
        (OSError(5, "broken"), "storage", "broken"),
        (ValueError("odd"), "internal", "ValueError: odd; this is a bug"),
        (KeyError(), "internal", "KeyError; this is a bug"),
    ],
)
def test_errors_of_others(capsys, error, kind, text):
    Output(as_json=True).fail(error)
    streams = capsys.readouterr()
    assert json.loads(streams.out)["error"]["kind"] == kind
    assert text in streams.err
    assert streams.err.count("\n") == 1


def test_debug_shows_where_it_came_from(capsys):
    with pytest.raises(CorruptionError) as caught:
        raise CorruptionError("bad")
    Output(debug=True).fail(caught.value)
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "test_output.py" in err


def test_the_program_is_named_once():
    assert output_module.PROGRAM == "vescale-ckpt"


def test_a_list_is_told_by_its_number_and_its_first_lines(capsys):
    Output().listed("none", [])
    Output().listed("left out", [f"w{i}" for i in range(22)])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["left out: 22", *(f"  w{i}" for i in range(20)), "  and 2 more; --json lists all"]
