"""Files of format version 1 are read for ever, and what was in them is what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from vescale_ckpt.format.fragment import decode_fragment, encode_fragment
from vescale_ckpt.format.manifest import decode_manifest, encode_manifest, manifest_name
from vescale_ckpt.format.records import FORMAT_VERSION

HERE = Path(__file__).parent
DATA = HERE / "data" / "v1"

NAMES = {
    "manifest-full": "2f938d3c14f3b0f2ebcc59512807c894e30f5f9db712273903b4fcd07ed2015f",
    "manifest-empty": "0a921afae41406d59611b08f2083da62122fbf63ae75b0804362f8aee5931153",
    "fragment-full": "3478b09f4d5825ea8361288ab3b02d3a80b0cada4773a4afff5ae1fb0516fafb",
}
"""Never to be changed: the files are what old stores hold."""
WRITES_V1 = FORMAT_VERSION == (1, 0)


def load_maker():
    spec = importlib.util.spec_from_file_location("make_v1", HERE / "make_v1.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_v1 = load_maker()


def test_no_file_was_changed():
    assert {path.stem: manifest_name(path.read_bytes()) for path in DATA.glob("*.bin")} == NAMES


@pytest.mark.parametrize("name", list(make_v1.MANIFESTS))
def test_manifests(name):
    data = (DATA / f"manifest-{name}.bin").read_bytes()
    manifest = decode_manifest(data)
    assert manifest == make_v1.MANIFESTS[name]()
    assert manifest.version == (1, 0)
    if WRITES_V1:
        assert encode_manifest(manifest) == data


def test_fragments():
    data = (DATA / "fragment-full.bin").read_bytes()
    fragment = decode_fragment(data)
    assert fragment == make_v1.full_fragment()
    if WRITES_V1:
        assert encode_fragment(fragment) == data


@pytest.mark.skipif(not WRITES_V1, reason="this version writes another format")
def test_the_script_makes_these_files_and_replaces_none(tmp_path):
    make_v1.main(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in DATA.iterdir()
    }
    with pytest.raises(FileExistsError):
        make_v1.main(tmp_path)
