from __future__ import annotations

import collections
import datetime as dt
import enum
import pathlib
import struct
import typing

import numpy as np
import pytest
import torch

from vescale_ckpt.errors import FormatError, InvalidInputError
from vescale_ckpt.state.tree import Foreign
from vescale_ckpt.state.values import MAX_VALUE_BYTES, PLAIN_TYPES, from_value, hint, to_value


class Pair(typing.NamedTuple):
    a: int
    b: int


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class MyStr(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value", [None, True, 0, -(2**500), 0.5, -0.0, float("inf"), 1 - 2j, "", "\ud800", b"", b"\xff"]
)
def test_plain_values_are_themselves(value):
    assert type(value) in PLAIN_TYPES
    assert to_value(value) is value
    assert from_value(value) is value


@pytest.mark.parametrize(
    ("obj", "kind", "text"),
    [
        (torch.bfloat16, "torch.dtype", "bfloat16"),
        (torch.half, "torch.dtype", "float16"),
        (torch.qint8, "torch.dtype", "qint8"),
        (torch.Size(()), "torch.Size", ""),
        (torch.Size((3, 0, 2**40)), "torch.Size", "3,0,1099511627776"),
        (torch.Size((-1,)), "torch.Size", "-1"),
        (torch.device("cpu"), "torch.device", "cpu"),
        (torch.device("cuda", 3), "torch.device", "cuda:3"),
        (torch.device("cuda"), "torch.device", "cuda"),
        (torch.sparse_coo, "torch.layout", "sparse_coo"),
        (torch.channels_last, "torch.memory_format", "channels_last"),
        (np.float32(1.5), "numpy.float32", "0000c03f"),
        (np.uint16(258), "numpy.uint16", "0201"),
        (np.bool_(True), "numpy.bool", "01"),
        (np.str_("é"), "numpy.str_", "é"),
        (np.bytes_(b"a\0b"), "numpy.bytes_", "610062"),
    ],
)
def test_values_of_torch_and_numpy_are_text_and_come_back(obj, kind, text):
    value = to_value(obj)
    assert value == Foreign(kind, text)
    back = from_value(value)
    assert back == obj
    assert type(back) is type(obj)


@pytest.mark.parametrize("name", ["int8", "uint64", "float16", "float32", "float64", "complex64", "complex128"])
def test_numpy_scalars_keep_every_bit(name):
    dtype = np.dtype(name)
    for seed in range(50):
        raw = np.random.default_rng(seed).bytes(dtype.itemsize)
        scalar = np.frombuffer(raw, dtype)[0]
        back = from_value(to_value(scalar))
        assert back.dtype == dtype
        assert back.tobytes() == raw


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_numpy_nan_payloads_survive(name):
    dtype = np.dtype(name)
    bits = {"float16": 0x7C01, "float32": 0x7F800001, "float64": 0x7FF0000000000001}[name]
    signalling = np.frombuffer(bits.to_bytes(dtype.itemsize, "little"), dtype)[0]
    assert from_value(to_value(signalling)).tobytes() == bits.to_bytes(dtype.itemsize, "little")


def test_numpy_integers_of_any_name_have_a_width():
    assert from_value(to_value(np.longlong(-5))) == np.int64(-5)
    assert from_value(to_value(np.longlong(-5))).dtype == np.dtype(np.longlong)


def test_every_dtype_of_torch_is_a_value():
    for dtype in {obj for obj in vars(torch).values() if isinstance(obj, torch.dtype)}:
        assert from_value(to_value(dtype)) is dtype


@pytest.mark.parametrize(
    ("obj", "says"),
    [
        (dt.datetime(2024, 1, 1), "timestamp"),  # noqa: DTZ001
        (dt.timedelta(1), "timestamp"),
        (np.datetime64("2024-01-01"), "timestamp"),
        (Color.RED, ".value"),
        (Level.LOW, ".value"),
        (MyStr("x"), "subclass"),
        (torch.__version__, "subclass"),
        (Pair(1, 2), "_asdict"),
        (collections.UserDict(), "state_dict"),
        ({1}, "sorted list"),
        (frozenset(), "sorted list"),
        (bytearray(b"x"), "bytes()"),
        (memoryview(b"x"), "bytes()"),
        (range(3), "start, stop"),
        (pathlib.PurePosixPath("/x"), "str()"),
        (torch.ones(2), "leaves"),
        (np.ones(2), "leaves"),
        (torch.Generator(), "get_state"),
        (np.random.default_rng(0), "bit_generator.state"),
        (np.longdouble(1), "numpy scalar of a plain type"),
        (np.void(b"abc"), "numpy scalar of a plain type"),
        (np.str_("\ud800"), "numpy scalar"),
        (int, "holds no code"),
        (len, "holds no code"),
        (object(), "state_dict"),
    ],
)
def test_everything_else_is_refused_with_path_type_and_way_out(obj, says):
    with pytest.raises(InvalidInputError) as caught:
        to_value(obj, ("extra", 0, "x"))
    assert "'extra.0.x'" in caught.value.message
    assert type(obj).__qualname__ in caught.value.message
    assert says in caught.value.message
    assert says in hint(obj)


def test_a_subclass_of_a_numpy_scalar_is_refused():
    class Mine(np.float64):
        pass

    with pytest.raises(InvalidInputError, match="Mine"):
        to_value(Mine(1.0))


@pytest.mark.parametrize("kind", ["str", "wide str", "bytes", "int"])
def test_values_too_large_for_a_tree_are_refused(kind):
    size = MAX_VALUE_BYTES + 1
    obj = {"str": "x" * size, "wide str": "é" * (size // 4 + 1), "bytes": b"x" * size, "int": 1 << (8 * size)}[kind]
    with pytest.raises(InvalidInputError, match="store it as a uint8 tensor"):
        to_value(obj, ("x",))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("torch.dtype", "float999"),
        ("torch.dtype", "nn"),
        ("torch.dtype", "strided"),
        ("torch.layout", "float32"),
        ("torch.device", "npu:0"),
        ("torch.device", "cuda:-1"),
        ("torch.device", "cpu\n"),
        ("torch.Size", "1,,2"),
        ("torch.Size", "x"),
        ("torch.Size", "9999999999999999999"),
        ("numpy.float32", "00"),
        ("numpy.float32", "zz"),
        ("numpy.float32", "00 00 00 00"),
        ("numpy.bool", "02"),
        ("numpy.bytes_", "0"),
        ("numpy.float128", "00"),
        ("os.system", "true"),
    ],
)
def test_text_that_is_no_value_is_refused_when_it_is_asked_for(kind, text):
    with pytest.raises(FormatError, match="read the snapshot where it is known"):
        from_value(Foreign(kind, text))


def test_floats_are_never_touched():
    signalling = struct.unpack("<d", (0x7FF0000000000001).to_bytes(8, "little"))[0]
    assert struct.pack("<d", from_value(to_value(signalling))) == struct.pack("<d", signalling)
