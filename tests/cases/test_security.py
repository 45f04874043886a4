"""C106 to C110: files that run code, lead outside, or promise more than they hold."""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 -- the attack
import struct
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import vescale_ckpt as vc
from tests.cases.inputs import tagged
from tests.cases.worlds import memory_store, save
from vescale_ckpt.errors import InvalidInputError, VeScaleError
from vescale_ckpt.interop.dcp import DCPWriter
from vescale_ckpt.interop.safetensors import load_hf
from vescale_storage import loop
from vescale_storage.keys import STORE_KEY

if TYPE_CHECKING:
    from pathlib import Path


class Marker:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class TestC106PicklesInMetadata:
    def bad(self, tmp_path: Path) -> tuple[Path, Path]:
        folder, marker = tmp_path / "dcp", tmp_path / "MARKER"
        folder.mkdir()
        (folder / ".metadata").write_bytes(pickle.dumps(Marker(marker)))
        return folder, marker

    @pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="what torch itself does was seen with 2.13")
    @pytest.mark.filterwarnings("ignore")
    def test_torch_runs_it(self, tmp_path):
        folder, marker = self.bad(tmp_path)
        with pytest.raises(CheckpointException):
            dcp.load({"w": torch.zeros(2)}, checkpoint_id=folder, no_dist=True)
        assert marker.exists()

    def test_a_folder_of_pickles_is_no_store_and_nothing_runs(self, tmp_path):
        folder, marker = self.bad(tmp_path)
        for opener in (vc.open_store, load_hf):
            with pytest.raises(VeScaleError):
                opener(folder)
        assert not marker.exists()

    @pytest.mark.parametrize("prefix", [STORE_KEY, "manifests/", "refs/", "packs/"])
    def test_no_object_of_a_store_is_unpickled(self, tmp_path, prefix):
        root, marker = tmp_path / "store", tmp_path / "MARKER"
        store = vc.open_store(root)
        save(store, 1, lambda _: {"w": tagged(400, 300), "x": {"a": [1, "b"]}})
        bad = pickle.dumps(Marker(marker))
        hit = [path for path in root.rglob("*") if path.is_file() and str(path.relative_to(root)).startswith(prefix)]
        assert hit
        for path in hit:
            path.chmod(0o644)
            path.write_bytes(bad)
        with pytest.raises(VeScaleError):
            vc.open_store(root)["run"].state_dict()
        assert not marker.exists()

    def test_a_save_and_a_load_unpickle_nothing(self, tmp_path):
        script = f"""
import sys
import torch, vescale_ckpt as vc
seen = []
sys.addaudithook(lambda event, args: seen.append(args) if event.startswith("pickle.") else None)
model = torch.nn.Linear(30, 20)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 30)).sum().backward(); optimizer.step()
state = {{"model": model, "optimizer": optimizer, "x": [1, (2.0, None, b"3")]}}
state["rng"] = vc.PerRank(torch.get_rng_state())
vc.save({str(tmp_path / "s")!r}, state)
vc.load({str(tmp_path / "s")!r}, state)
vc.open_store({str(tmp_path / "s")!r})["checkpoint"].state_dict()
assert not seen, seen
print("done")
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
        assert done.stdout == "done\n", done.stderr

    @pytest.mark.filterwarnings("ignore")
    def test_what_would_need_a_pickle_is_refused_at_save(self, tmp_path):
        store = memory_store()
        with pytest.raises(InvalidInputError, match="odd"):
            save(store, 1, lambda _: {"odd": Marker(tmp_path / "MARKER")})
        with pytest.raises(CheckpointException, match="cannot store"):
            dcp.save({"odd": Marker(tmp_path / "MARKER")}, storage_writer=DCPWriter(store, "dcp", 1), no_dist=True)
        assert not (tmp_path / "MARKER").exists()

    def test_a_torch_save_zip_under_the_name_of_weights_is_refused(self, tmp_path):
        marker = tmp_path / "MARKER"
        path = tmp_path / "model.safetensors"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("bad/data.pkl", pickle.dumps({"w": Marker(marker)}))
        with pytest.raises(VeScaleError, match=r"model\.safetensors"):
            load_hf(path)
        assert not marker.exists()


def safetensors(header: object, data: bytes, length: int | None = None) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def entry(shape: list[int], low: int, high: int, dtype: str = "F32") -> dict:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": [low, high]}}


class TestC108NamesThatLeadOutside:
    @pytest.mark.parametrize(
        "target",
        ["../outside.safetensors", "/outside.safetensors", "a/../../outside.safetensors", "..", "sub/x.safetensors"],
    )
    def test_they_are_refused_before_anything_is_opened(self, tmp_path, target, monkeypatch):
        folder = tmp_path / "hf"
        folder.mkdir()
        (tmp_path / "outside.safetensors").write_bytes(safetensors(entry([2, 2], 0, 16), bytes(16)))
        target = target if target != "/outside.safetensors" else str(tmp_path / "outside.safetensors")
        index = {"metadata": {"total_size": 16}, "weight_map": {"w": target}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        opened = []
        monkeypatch.setattr(
            "vescale_ckpt.interop.safetensors.file.SafetensorsFile.__init__", lambda *a: opened.append(a)
        )
        with pytest.raises(VeScaleError, match="safetensors"):
            load_hf(folder)
        assert not opened

    @pytest.mark.parametrize("run", ["../up", "..", "/etc", "a/../../b"])
    def test_names_of_runs_cannot_leave_the_store(self, tmp_path, run):
        store = vc.open_store(tmp_path / "store")
        for attempt in (lambda: vc.Checkpointer(store, run), lambda: store[run], lambda: store[f"{run}@1"]):
            with pytest.raises(VeScaleError):
                attempt()
        assert list(tmp_path.iterdir()) in ([], [tmp_path / "store"])


class TestC110HeadersThatPromiseTooMuch:
    GOOD = entry([2, 2], 0, 16)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (safetensors(GOOD, bytes(9)), ""),
            (safetensors(GOOD, b"")[:20], ""),
            (b"\x01" * 7, ""),
            (safetensors(GOOD, bytes(16), length=10_000), ""),
            (safetensors(GOOD, bytes(16), length=2**62), ""),
            (safetensors(b"{nope", bytes(16)), ""),
            (safetensors(entry([2, 2], 0, 16, "F99"), bytes(16)), "F99"),
            (safetensors(entry([1000, 1000], 0, 4), bytes(4)), ""),
            (safetensors(entry([2**31, 2**31, 4], 0, 4), bytes(4)), ""),
            (safetensors(entry([4], 100, 116), bytes(16)), ""),
            (b"PK\x03\x04" + bytes(200), ""),
            (b"", ""),
        ],
    )
    def test_each_is_refused_with_the_file(self, tmp_path, content, words):
        path = tmp_path / "weights.safetensors"
        path.write_bytes(content)
        with pytest.raises(VeScaleError, match=r"weights\.safetensors") as caught:
            load_hf(path)
        assert words in str(caught.value)

    @pytest.mark.parametrize("prefix", ["manifests/", "refs/", "packs/", "store.json"])
    @pytest.mark.parametrize("cut", [0, 1, 7, 100, -1])
    def test_a_cut_object_of_a_store_is_an_error_of_ours(self, prefix, cut):
        store = memory_store()
        save(store, 1, lambda _: {"w": tagged(400, 300), "x": {"a": [1, "b"]}})

        async def cut_all() -> int:
            keys = [info.key async for info in store.backend.list(prefix if prefix.endswith("/") else "")]
            hit = [key for key in keys if key.startswith(prefix)]
            for key in hit:
                content = await store.backend.get(key)
                await store.backend.put(key, [content[: cut if cut >= 0 else len(content) + cut]])
            return len(hit)

        assert loop.run(cut_all())
        again = vc.open_store(store.url) if prefix != "store.json" else None
        with pytest.raises(VeScaleError):
            (again or vc.open_store(store.url))["run"].state_dict()
