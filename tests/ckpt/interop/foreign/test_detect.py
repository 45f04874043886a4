"""What a checkpoint is, and what is refused: no code, no way out, no time and no memory."""

from __future__ import annotations

import resource
import time

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from tests.ckpt.interop.foreign import bad
from vescale_ckpt.errors import ConfigError, FormatError, NotFoundError, VeScaleError
from vescale_ckpt.interop.foreign.detect import open_foreign


def read_all(path) -> None:
    with open_foreign(path) as snapshot:
        dict(snapshot.values)
        snapshot.state_dict()


def refusal(path) -> VeScaleError | None:
    try:
        read_all(path)
    except VeScaleError as error:
        return error
    return None


def test_everything_bad_is_refused_at_once_and_nothing_runs(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, path in bad.build(inside).items():
        began = time.monotonic()
        error = refusal(path)
        assert isinstance(error, FormatError | NotFoundError), (name, error)
        assert len(str(error)) < 1000, name
        assert time.monotonic() - began < 20, name
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB
    assert not list(tmp_path.rglob("MARKER"))


def test_the_builder_makes_an_archive_that_is_good_where_its_numbers_are(tmp_path):
    path = tmp_path / "good.pt"
    bad.archive(path, {"x/data.pkl": bad.tensor_pickle(), "x/version": b"3\n", "x/data/0": bytes(16)})
    assert open_foreign(path).read("w").tolist() == [[0, 0], [0, 0]]
    assert torch.load(path)["w"].tolist() == [[0, 0], [0, 0]]


def test_files_and_folders_are_found_to_be_what_they_are(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert open_foreign(tmp_path).format == "safetensors"
    assert open_foreign(tmp_path / "model.safetensors").format == "safetensors"
    assert open_foreign(str(tmp_path / "w.pt")).format == "torch_save"
    assert open_foreign(f"file://{tmp_path}/w.pt", format="torch_save").format == "torch_save"


def test_a_url_of_fsspec_is_opened_in_place(tmp_path):
    save_file({"w": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    memory = fsspec.filesystem("memory")
    for name in ("model.safetensors", "w.pt"):
        memory.pipe(f"/foreign/x/{name}", (tmp_path / name).read_bytes())
    assert open_foreign("memory://foreign/x").read("w", slice(1, 2)).tolist() == [[3, 4, 5]]
    assert open_foreign("memory://foreign/x/w.pt").read("w").tolist() == [1, 1]
    with pytest.raises(NotFoundError):
        open_foreign("memory://foreign/nothing")


def test_what_is_no_checkpoint_says_what_was_found(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FormatError, match=r"notes\.txt"):
        open_foreign(tmp_path)
    with pytest.raises(FormatError, match="neither safetensors nor"):
        open_foreign(tmp_path / "notes.txt")
    with pytest.raises(NotFoundError):
        open_foreign(tmp_path / "absent")
    with pytest.raises(ConfigError, match="torch_save"):
        open_foreign(tmp_path, format="pickle")
