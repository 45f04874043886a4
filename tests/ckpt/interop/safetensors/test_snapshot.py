"""safetensors opened in place: files, folders with an index, ties, and what is carried along."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from vescale_ckpt.errors import CorruptionError, FormatError, NotFoundError
from vescale_ckpt.interop.foreign.detect import open_foreign


@pytest.fixture
def folder(tmp_path):
    """Two files with unusual names, an index, a tie, and a configuration."""
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "a.safetensors", {"head": "a", "format": "pt"})
    save_file({"b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "b-part.safetensors")
    index = {"metadata": {"total_size": 28}, "weight_map": {"a": "a.safetensors", "b": "b-part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    (tmp_path / "code.py").write_text("raise SystemExit")
    return tmp_path


def test_tensors_ties_grouping_and_what_is_carried(folder):
    snapshot = open_foreign(folder)
    assert snapshot.shards == {"a.safetensors": ("a",), "b-part.safetensors": ("b",)}
    assert snapshot.tensors()["head"].alias_of == "a"
    assert snapshot.read("head", slice(1, 2)).tolist() == [[3, 4, 5]]
    assert snapshot.read("b").dtype is torch.bfloat16
    assert snapshot.carried() == ("config.json",)
    assert snapshot.metadata["format"] == "pt"


def test_one_file_alone_carries_nothing(folder):
    snapshot = open_foreign(folder / "a.safetensors")
    assert set(snapshot.tensors()) == {"a", "head"}
    assert snapshot.carried() == ()


def test_a_file_that_the_index_names_and_is_not_there_is_told(folder):
    (folder / "b-part.safetensors").unlink()
    with pytest.raises(NotFoundError, match="b-part"):
        open_foreign(folder)


def test_an_index_that_disagrees_is_refused(folder):
    save_file({"c": torch.ones(2)}, folder / "b-part.safetensors")
    with pytest.raises(FormatError, match="does not name"):
        open_foreign(folder)


def test_files_without_an_index_are_not_guessed_at(folder):
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(NotFoundError, match="belong together"):
        open_foreign(folder)


def test_a_file_that_is_cut_while_it_is_open_is_told(folder):
    snapshot = open_foreign(folder)
    path = folder / "a.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(CorruptionError, match="cut"):
        snapshot.read("a")


def test_hugging_faces_cache_keeps_its_files_behind_links(folder, tmp_path):
    cache = tmp_path / "hub" / "models--x"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (folder / "a.safetensors").rename(cache / "blobs" / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert open_foreign(snapshot).read("a").shape == (2, 3)
