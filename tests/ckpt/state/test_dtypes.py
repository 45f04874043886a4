from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch

import vescale_ckpt
from vescale_ckpt.errors import ConfigError, FormatError
from vescale_ckpt.state.dtypes import DTYPE_NAMES, dtype_from_name, dtype_name, item_bytes

ALL = sorted({obj for obj in vars(torch).values() if isinstance(obj, torch.dtype)}, key=str)
STORED = [dtype for dtype in ALL if str(dtype).removeprefix("torch.") in DTYPE_NAMES]


def is_quantized_or_packed(dtype: torch.dtype) -> bool:
    name = str(dtype).removeprefix("torch.")
    return name.startswith(("q", "bits")) or (name.startswith(("int", "uint")) and dtype.itemsize * 8 != _width(name))


def _width(name: str) -> int:
    return int(name.lstrip("uint") or 0)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_dtype_of_torch_is_stored_or_refused_with_a_way_out(dtype):
    if is_quantized_or_packed(dtype):
        with pytest.raises(ConfigError, match="store "):
            dtype_name(dtype)
    else:
        name = dtype_name(dtype)
        assert dtype_from_name(name) is dtype
        assert item_bytes(name) == torch.empty(0, dtype=torch.uint8).view(dtype).element_size()


def test_what_is_stored_includes_every_8_bit_float_and_half_of_a_complex():
    assert {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"} <= DTYPE_NAMES
    assert {"uint16", "uint32", "uint64", "complex32", "bool", "bfloat16"} <= DTYPE_NAMES


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("float8_e4m3fn", 1),
        ("float8_e8m0fnu", 1),
        ("float4_e2m1fn_x2", 1),
        ("bfloat16", 2),
        ("complex32", 4),
        ("complex128", 16),
    ],
)
def test_item_size_is_the_dtypes_and_not_its_names(name, size):
    assert item_bytes(name) == size


@pytest.mark.parametrize(
    "name", ["half", "float", "long", "torch.float32", "", "FLOAT32", "float8", "qint8", "x" * 5000]
)
def test_unknown_names_and_aliases_are_refused(name):
    with pytest.raises(FormatError, match="a newer torch may know it") as caught:
        dtype_from_name(name)
    assert len(caught.value.message) < 600


def test_the_way_out_of_a_refused_dtype_works():
    packed = torch.arange(4, dtype=torch.uint8).view(torch.uint4)
    assert dtype_name(packed.view(torch.uint8).dtype) == "uint8"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [dtype for dtype in STORED if dtype is not torch.bool], ids=str)
def test_all_byte_values_pass_through_a_view(dtype):
    raw = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(raw.view(dtype).clone().view(torch.uint8), raw)


def test_names_and_sizes_need_no_numpy():
    package = str(pathlib.Path(vescale_ckpt.__file__).parent)
    code = (
        "import sys, types; sys.modules['numpy'] = None\n"
        "package = types.ModuleType('vescale_ckpt')\n"  # without its __init__, which imports all of it
        f"package.__path__ = [{package!r}]; sys.modules['vescale_ckpt'] = package\n"
        "from vescale_ckpt.state.dtypes import DTYPE_NAMES, dtype_from_name, dtype_name, item_bytes\n"
        "assert all(dtype_name(dtype_from_name(n)) == n and item_bytes(n) > 0 for n in DTYPE_NAMES)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
