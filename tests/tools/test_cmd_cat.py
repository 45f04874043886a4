from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
import torch

import vescale_ckpt as vc
from vescale_tools.cmd_cat import parse_index


@pytest.fixture
def some(tmp_path):
    state = {
        "m": torch.arange(12.0).reshape(3, 4),
        "cube": torch.arange(8).reshape(2, 2, 2),
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "eight": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        "z": torch.tensor([1 + 2j]),
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 3),
        "a[0]": torch.tensor([7]),
        "lr": 0.25,
        "nested": {"note": "a\x1bb"},
    }
    with vc.open_store(tmp_path / "s") as store, vc.Checkpointer(store, "run") as checkpointer:
        checkpointer.save(1, state)
    return tmp_path / "s"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("m", ["0 1 2 3", "4 5 6 7", "8 9 10 11"]),
        ("m[1]", ["4 5 6 7"]),
        ("m[-1]", ["8 9 10 11"]),
        ("m[:2, -2:]", ["2 3", "6 7"]),
        ("cube", ["0 1", "2 3", "", "4 5", "6 7"]),
        ("half", ["1.5 nan"]),
        ("eight", ["1.5 -2"]),
        ("z", ["1+2j"]),
        ("flag", ["True"]),
        ("none", ["(0 numbers)"]),
        ("a[0]", ["7"]),
        ("lr", ["0.25"]),
        ("nested.note", [r"'a\x1bb'"]),
    ],
)
def test_as_text(command, some, name, lines):
    result = command("cat", some, "run@1", name)
    assert (result.code, result.err) == (0, "")
    assert result.lines == lines


def test_as_json(command, some):
    assert command("cat", some, "run@1", "m[1:, 0]", "--json").json == {
        "snapshot": "run@1",
        "name": "m",
        "dtype": "float32",
        "shape": [2, 1],
        "offset": [1, 0],
        "values": [[4.0], [8.0]],
    }
    assert command("cat", some, "run@1", "half", "--json").json["values"] == [1.5, "nan"]
    assert command("cat", some, "run@1", "lr", "--json").json["value"] == 0.25


def test_a_file(command, some, tmp_path):
    assert command("cat", some, "run@1", "m[1:]", "--npy", tmp_path / "m.npy").code == 0
    assert np.load(tmp_path / "m.npy").tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    again = command("cat", some, "run@1", "m", "--npy", tmp_path / "m.npy")
    assert again.code == 11
    assert np.load(tmp_path / "m.npy").shape == (2, 4)


def test_what_numpy_has_not(command, some, tmp_path):
    result = command("cat", some, "run@1", "half", "--npy", tmp_path / "h.npy")
    assert result.code == 2
    assert "--float32" in result.err
    assert not (tmp_path / "h.npy").exists()
    assert command("cat", some, "run@1", "half", "--npy", tmp_path / "h.npy", "--float32").code == 0
    assert np.load(tmp_path / "h.npy")[0] == np.float32(1.5)


def test_a_pipe(some):
    program = [sys.executable, "-m", "vescale_tools.cli", "cat", str(some), "run@1", "m", "--npy", "-"]
    done = subprocess.run(program, capture_output=True, timeout=120, check=True)
    assert np.load(io.BytesIO(done.stdout)).shape == (3, 4)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nope"], 10),
        (["nested"], 10),
        (["lr[0]"], 2),
        (["m[::2]"], 2),
        (["m[1,2,3]"], 2),
        (["m", "--most", "11"], 2),
        (["m", "--most", "0"], 2),
        (["m", "--npy", "-", "--json"], 2),
    ],
)
def test_bad_input(command, some, arguments, code):
    assert command("cat", some, "run@1", *arguments).code == code


def test_what_is_below_a_container_is_told(command, some):
    assert "below it are nested.note" in command("cat", some, "run@1", "nested").err


def test_slices():
    assert parse_index("a.b") == ("a.b", None)
    assert parse_index("a.b[3]") == ("a.b", (slice(3, 4),))
    assert parse_index("a[-1,:]") == ("a", (slice(-1, None), slice(None, None)))
    assert parse_index("w[x]") == ("w[x]", None)
