from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file, save_model

from vescale_ckpt.errors import FormatError, InvalidInputError, NotFoundError
from vescale_ckpt.interop.safetensors import load_hf, open_hf
from vescale_ckpt.interop.safetensors.folder import INDEX_NAME, SINGLE_NAME
from vescale_ckpt.interop.safetensors.ties import TIES_KEY


def write_index(folder, weight_map, **metadata):
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": torch.arange(3), "b": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"c": torch.zeros(1)}, tmp_path / "b-part.safetensors")
    write_index(tmp_path, {"a": "a.safetensors", "b": "a.safetensors", "c": "b-part.safetensors"}, total_size=36)
    return tmp_path


def test_one_file(tmp_path):
    save_file({"x.y": torch.arange(3)}, tmp_path / SINGLE_NAME)
    state = load_hf(tmp_path)
    assert list(state) == ["model"]
    assert torch.equal(state["model"]["x.y"], torch.arange(3))
    assert torch.equal(load_hf(tmp_path / SINGLE_NAME)["model"]["x.y"], torch.arange(3))


def test_one_file_of_another_name(tmp_path):
    save_file({"x": torch.arange(3)}, tmp_path / "consolidated.safetensors")
    assert set(load_hf(str(tmp_path))["model"]) == {"x"}


def test_shards_keep_their_names_and_groups(sharded):
    folder = open_hf(sharded)
    assert folder.files == {"a.safetensors": ("a", "b"), "b-part.safetensors": ("c",)}
    assert list(load_hf(sharded)["model"]) == ["a", "b", "c"]


def test_the_single_file_is_preferred_as_by_other_loaders(sharded):
    save_file({"only": torch.ones(1)}, sharded / SINGLE_NAME)
    assert set(load_hf(sharded)["model"]) == {"only"}


def test_a_module_loads_what_was_imported(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    save_file(model.state_dict(), tmp_path / SINGLE_NAME)
    model.load_state_dict(load_hf(tmp_path)["model"], strict=True)


def test_ties_are_one_tensor_again(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    save_model(model, str(tmp_path / SINGLE_NAME))
    state = load_hf(tmp_path)["model"]
    assert set(state) == {"a.weight", "b.weight"}
    assert state["b.weight"] is state["a.weight"]


def test_ties_in_the_index(sharded):
    index = json.loads((sharded / INDEX_NAME).read_text())
    write_index(sharded, index["weight_map"], total_size=36, head="c")
    state = load_hf(sharded)["model"]
    assert state["head"] is state["c"]


def test_ties_that_contradict_each_other(sharded):
    save_file({"a": torch.arange(3), "b": torch.ones(2)}, sharded / "a.safetensors", {"head": "a"})
    save_file({"c": torch.zeros(1)}, sharded / "b-part.safetensors", {TIES_KEY: '{"head": "c"}'})
    with pytest.raises(FormatError, match="ties 'head' to 'c'"):
        load_hf(sharded)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "ABSOLUTE",
        "sub/x.safetensors",
        "./a.safetensors",
        "..",
        ".",
        "",
        "..\\outside.safetensors",
        "C:outside.safetensors",
        "a.safetensors/",
        "a\0.safetensors",
        "pytorch_model.bin",
        7,
        None,
        ["a.safetensors"],
    ],
)
def test_names_that_lead_elsewhere_are_refused_before_anything_is_opened(sharded, name, monkeypatch):
    outside = sharded.parent / "outside.safetensors"
    save_file({"w": torch.ones(4)}, outside)
    target = str(outside) if name == "ABSOLUTE" else name
    write_index(sharded, {"a": "a.safetensors", "w": target})
    opened = []
    monkeypatch.setattr("vescale_ckpt.interop.safetensors.folder.read_safetensors_header", opened.append)
    with pytest.raises(FormatError, match="puts 'w' into"):
        load_hf(sharded)
    assert not opened


@pytest.mark.parametrize(
    "text",
    [
        b"{nope",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}',
        b'{"weight_map": {"\\ud800": "a.safetensors"}}',
        b'{"weight_map":' + b"[" * 100_000,
        b"\xff",
    ],
)
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / INDEX_NAME).write_bytes(text)
    with pytest.raises(FormatError, match=INDEX_NAME):
        load_hf(tmp_path)


def test_an_index_without_end_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("vescale_ckpt.interop.safetensors.folder.MAX_HEADER_BYTES", 100)
    (tmp_path / INDEX_NAME).write_bytes(b" " * 101)
    with pytest.raises(FormatError, match="larger than"):
        load_hf(tmp_path)


def test_missing_files_are_all_named(sharded):
    write_index(sharded, {"a": "a.safetensors", "x": "x.safetensors", "y": "y.safetensors"})
    with pytest.raises(NotFoundError, match=r"2 of 3 files are not there: 'x.safetensors', 'y.safetensors'"):
        load_hf(sharded)


def test_an_index_and_files_that_disagree(sharded):
    write_index(sharded, {"a": "a.safetensors", "b": "b-part.safetensors", "d": "a.safetensors"})
    with pytest.raises(FormatError, match=r"2 tensors are not in .* \('b', 'd'\) and the files hold 1 .* \('c'\)"):
        load_hf(sharded)


def test_one_name_in_two_files(sharded):
    save_file({"c": torch.zeros(1), "a": torch.arange(3)}, sharded / "b-part.safetensors")
    with pytest.raises(FormatError, match=r"'a' is both in a\.safetensors and in b-part\.safetensors"):
        load_hf(sharded)


def test_a_damaged_shard_is_found_before_any_is_read(sharded, monkeypatch):
    (sharded / "b-part.safetensors").write_bytes(b"")
    monkeypatch.setattr("vescale_ckpt.interop.safetensors.file.SafetensorsFile.read", None)
    with pytest.raises(FormatError, match="b-part"):
        load_hf(sharded)


def test_several_files_without_an_index(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.ones(1)}, tmp_path / name)
    with pytest.raises(NotFoundError, match=r"'a.safetensors', 'b.safetensors' and no index"):
        load_hf(tmp_path)


def test_one_of_several_files_is_not_the_model(tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model-00001-of-00010.safetensors", "x-1-of-3.safetensors"):
        save_file({"x": torch.ones(1)}, tmp_path / name)
        with pytest.raises(NotFoundError, match="no index"):
            load_hf(tmp_path)
        assert load_hf(tmp_path / name)["model"]
        (tmp_path / name).unlink()
    save_file({"x": torch.ones(1)}, tmp_path / "model-00001-of-00001.safetensors")
    assert load_hf(tmp_path)["model"]


def test_nothing_to_import(tmp_path):
    with pytest.raises(NotFoundError, match="it has no such file"):
        load_hf(tmp_path)
    with pytest.raises(NotFoundError, match="no such file"):
        load_hf(tmp_path / "absent")


def test_a_folder_under_the_name_of_a_file(tmp_path):
    (tmp_path / SINGLE_NAME).mkdir()
    with pytest.raises(InvalidInputError, match="no file"):
        load_hf(tmp_path)
