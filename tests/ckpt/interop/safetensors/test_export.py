from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vescale_ckpt.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    CorruptionError,
    NoSpaceError,
    StorageError,
)
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.safetensors import (
    ExportOptions,
    check_target,
    export_snapshot,
    load_hf,
    open_hf,
    plan_export,
)
from vescale_ckpt.interop.safetensors import export as export_module
from vescale_ckpt.interop.safetensors.dtypes import BITS, torch_dtype
from vescale_ckpt.interop.safetensors.folder import INDEX_NAME, SINGLE_NAME


def run(snapshot, folder, *, overwrite=False, buffer_bytes=1 << 20, progress=None, **options):
    plan = plan_export(snapshot.manifest, ExportOptions(**options))
    target = check_target(folder, overwrite=overwrite)
    return export_snapshot(snapshot, plan, target, buffer_bytes=buffer_bytes, progress=progress)


def same(a, b):
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def files_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out" / "hf"


@pytest.fixture
def three(saved):
    return saved({"model": {name: torch.full((1000,), float(i)) for i, name in enumerate("abc")}})


def every_dtype():
    generator = torch.Generator().manual_seed(1)
    for name in BITS:
        dtype = torch_dtype(name)
        if dtype is not None:
            raw = torch.randint(0, 2 if name == "BOOL" else 256, (5, 6 * dtype.itemsize), generator=generator)
            yield f"t.{name}", raw.to(torch.uint8).view(dtype)


def test_every_dtype_comes_back_to_the_bit(saved, folder):
    state = dict(every_dtype()) | {"scalar": torch.tensor(-0.0), "none": torch.zeros(0, 3), "b": torch.tensor([True])}
    report = run(saved({"model": state}), folder)
    assert report.num_tensors == len(state)
    assert report.overflowed == {}
    back = load_hf(folder)["model"]
    assert set(back) == set(state)
    assert all(same(back[name], tensor) for name, tensor in state.items())


def test_the_formats_own_library_reads_it(saved, folder):
    state = {
        name: tensor for name, tensor in every_dtype() if name not in {"t.F4", "t.F8_E8M0"}
    }  # it writes those only
    run(saved({"model": state}), folder)
    read = load_file(folder / SINGLE_NAME)
    assert all(same(read[name], tensor) for name, tensor in state.items())


def test_any_strides_and_codec_are_written_row_major(saved, folder):
    base = torch.arange(2 * 3 * 8 * 8, dtype=torch.float32).reshape(2, 3, 8, 8)
    state = {
        "transposed": base[0, 0].t(),
        "columns": base[0, 0, :, ::2],
        "permuted": base.permute(3, 1, 0, 2),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
    }
    run(saved({"model": state}, codec="zstd"), folder)
    assert all(same(load_file(folder / SINGLE_NAME)[name], tensor) for name, tensor in state.items())


def test_tensors_larger_than_the_buffer(saved, folder):
    generator = torch.Generator().manual_seed(2)
    state = {
        "long": torch.randn(2_000_003, generator=generator),
        "wide": torch.randn(2, 700_001, generator=generator),
        "deep": torch.randn(3, 5, 70_001, generator=generator),
    }
    seen = []
    run(saved({"model": state}), folder, progress=seen.append)
    assert all(same(load_file(folder / SINGLE_NAME)[name], tensor) for name, tensor in state.items())
    assert sum(seen) == sum(tensor.nbytes for tensor in state.values())
    assert max(seen) <= (1 << 20) // 3


def test_shards_with_an_index(three, folder):
    report = run(three, folder, max_shard_bytes=8000)
    assert files_in(folder) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)] + [INDEX_NAME]
    assert [path.name for path in report.files] == files_in(folder)[:2]
    assert open_hf(folder).files == {
        "model-00001-of-00002.safetensors": ("a", "b"),
        "model-00002-of-00002.safetensors": ("c",),
    }
    assert all(same(load_hf(folder)["model"][name], three.read(f"model.{name}")) for name in "abc")


def test_ties_come_back_as_ties(saved, folder):
    p = torch.nn.Parameter(torch.randn(4, 3))
    snapshot = saved({"model": {"embed": p, "x": torch.ones(5), "head": p}})
    for options in ({}, {"max_shard_bytes": 20}):
        shutil.rmtree(folder, ignore_errors=True)
        run(snapshot, folder, **options)
        state = load_hf(folder)["model"]
        assert state["head"] is state["embed"]
        again = saved({"model": state})
        assert again.tensors()["model.head"].alias_of == "model.embed"


CASTS = [
    *(1.0 + 2.0**-8, 1.0 + 2.0**-8 + 2.0**-20, 1.0 + 2.0**-8 - 2.0**-20, 1.0 + 3 * 2.0**-8),  # ties to even
    *(-(1.0 + 2.0**-8), 0.0, -0.0, float("inf"), float("-inf"), float("nan")),
    *(2.0**-149, 2.0**-133, -(2.0**-134), 1e-40, 3.3895e38, 3.4028235e38, -3.4028235e38, 65504.0, 65520.0),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_is_torchs_own_and_overflow_is_counted(saved, folder, dtype):
    source = torch.tensor(CASTS)
    nan = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)  # payload in the low bits only
    state = {"w": torch.cat([source, nan]), "ids": torch.arange(3)}
    report = run(saved({"model": state}), folder, dtype=dtype)
    back = load_hf(folder)["model"]
    assert same(back["w"], state["w"].to(dtype))
    assert back["w"].isnan().sum() == 3
    assert same(back["ids"], state["ids"])
    infinite = int((state["w"].to(dtype).isinf() & state["w"].isfinite()).sum())
    assert report.overflowed == ({"w": infinite} if infinite else {})
    assert infinite == {torch.bfloat16: 2, torch.float16: 4, torch.float64: 0}[dtype]


def test_a_folder_that_is_not_empty_is_refused(three, folder):
    folder.mkdir(parents=True)
    check_target(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(AlreadyExistsError, match=r"not empty \(config.json\)"):
        check_target(folder)
    assert check_target(folder, overwrite=True).removed == ()
    with pytest.raises(AlreadyExistsError, match="it is a file"):
        check_target(folder / "config.json", overwrite=True)


@pytest.mark.parametrize("first", [{}, {"max_shard_bytes": 4000}])
@pytest.mark.parametrize("second", [{}, {"max_shard_bytes": 8000}])
def test_overwriting_replaces_weights_and_nothing_else(three, saved, folder, first, second):
    run(three, folder, **first)
    (folder / "config.json").write_text("{}")
    (folder / "adapter.safetensors").write_text("mine")
    (folder / ".vescale-export-0123456789abcdef").mkdir()
    other = saved({"model": {name: torch.full((1000,), 9.0) for name in "abc"}})
    run(other, folder, overwrite=True, **second)
    kept = {"config.json", "adapter.safetensors"}
    new = {SINGLE_NAME} if not second else {INDEX_NAME, *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2))}
    assert set(files_in(folder)) == kept | new
    assert all(tensor.eq(9).all() for tensor in load_hf(folder)["model"].values())


class Interrupted(BaseException):
    """As KeyboardInterrupt: no Exception."""


@pytest.mark.parametrize("error", [Interrupted("now"), CorruptionError("bad"), OSError(28, "full")])
def test_nothing_is_left_of_an_export_that_failed(three, folder, error):
    seen = []

    def fail(num_bytes):
        seen.append(num_bytes)
        if len(seen) == 3:
            raise error

    with pytest.raises(NoSpaceError if isinstance(error, OSError) else type(error)):
        run(three, folder, max_shard_bytes=4000, progress=fail)
    assert not folder.exists()
    folder.mkdir(parents=True)
    seen.clear()
    with pytest.raises(BaseException):  # noqa: B017, PT011 - whichever it is
        run(three, folder, progress=fail)
    assert files_in(folder) == []


@pytest.mark.parametrize("new", [{}, {"max_shard_bytes": 8000}, {"max_shard_bytes": 4000}])
@pytest.mark.parametrize("old", [{}, {"max_shard_bytes": 4000}])
def test_wherever_it_stops_what_can_be_loaded_is_all_old_or_all_new(three, saved, folder, monkeypatch, old, new):
    other = saved({"model": {name: torch.full((1000,), 9.0) for name in "abc"}})
    before = {name: three.read(f"model.{name}") for name in "abc"}
    outcomes = []
    for stop_at in range(1, 20):
        shutil.rmtree(folder, ignore_errors=True)
        run(three, folder, **old)
        steps = _stop_at_step(monkeypatch, stop_at)
        try:
            run(other, folder, overwrite=True, **new)
        except Interrupted:
            pass
        else:
            break
        finally:
            steps.undo()
        try:
            state = load_hf(folder)["model"]
        except LookupError:
            outcomes.append("none")
            continue
        is_new = all(tensor.eq(9).all() for tensor in state.values())
        assert is_new or all(torch.equal(state[name], tensor) for name, tensor in before.items())
        assert set(state) == set("abc")
        outcomes.append("new" if is_new else "old")
    assert outcomes[0] == "old"
    assert ("none" in outcomes) == (bool(old) and old == new)  # then files take the place of files


def _stop_at_step(monkeypatch, number):
    """Stop before the n-th change that gives or takes a name in the target folder."""
    count = 0
    context = pytest.MonkeyPatch()

    def counted(function):
        def call(self, *args, **kwargs):
            nonlocal count
            count += 1
            if count >= number:
                raise Interrupted
            return function(self, *args, **kwargs)

        return call

    context.setattr(Path, "replace", counted(Path.replace))
    context.setattr(Path, "unlink", counted(Path.unlink))
    return context


def test_damaged_bytes_are_never_exported(saved, tmp_path, folder):
    store = tmp_path / "store"
    snapshot = saved({"model": {"w": torch.arange(100_000)}}, url=store)
    pack = max((store / "packs").glob("*/*"), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[1000] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)
    with pytest.raises(CorruptionError, match=re.escape("'model.w'")):
        run(snapshot, folder)
    assert not folder.exists()


def test_a_full_disk_is_told_before_anything_is_read(three, folder, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=11_000)
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(NoSpaceError, match=r"needs 12\d\d\d bytes and the disk of .* has 11000 free"):
        run(three, folder)
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(three, folder):
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    with pytest.raises(AccessDeniedError, match=str(folder)):
        run(three, folder)


def test_a_place_that_cannot_be(three, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        run(three, tmp_path / "file" / "sub")


def test_a_buffer_that_is_too_small(three, folder):
    with pytest.raises(ConfigError, match="at least 1 MiB"):
        run(three, folder, buffer_bytes=1000)


def test_at_most_the_buffer_is_held(saved, folder):
    snapshot = saved({"model": {str(i): torch.zeros(100_000) for i in range(20)} | {"big": torch.zeros(1_000_000)}})
    held, largest = 0, 0

    class Watched:
        name, manifest = snapshot.name, snapshot.manifest

        @staticmethod
        def read(path, box=None):
            nonlocal held, largest
            held += box.volume * 4
            largest = max(largest, held)
            return snapshot.read(path, box)

    def written(num_bytes):
        nonlocal held
        held -= num_bytes

    run(Watched(), folder, progress=written)
    assert (1 << 20) // 3 < largest <= 1 << 20


def test_what_is_read_is_asked_for_by_box(three):
    assert torch.equal(three.read(("model", "b"), Box((3,), (2,))), torch.ones(2))


MEMORY = """
import json, pathlib, sys
import vescale_ckpt as vc
from vescale_ckpt.interop.safetensors import check_target, export_snapshot, plan_export
url, out = sys.argv[1:]

def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10

with vc.open_store(url) as store:
    snapshot = store["run@7"]
    plan = plan_export(snapshot.manifest)
    snapshot.read(snapshot.manifest.tensors[0].path, vc.Box((0, 0), (1, 1)))
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak()
    export_snapshot(snapshot, plan, check_target(out), buffer_bytes=8 << 20)
print(json.dumps([plan.num_bytes, peak() - before]))
"""


def test_memory_is_bounded_whatever_the_size(saved, tmp_path, folder):
    block = torch.randn(2**20)
    state = {str(i): block + i for i in range(8)} | {"big": torch.cat([block + 100 + i for i in range(24)])}
    state = {name: tensor.reshape(-1, 1024) for name, tensor in state.items()}
    saved({"model": state}, url=tmp_path / "store")
    digests = {name: hashlib.sha256(tensor.numpy()).digest() for name, tensor in state.items()}
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "store"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    num_bytes, grown = json.loads(done.stdout.splitlines()[-1])
    assert num_bytes == 32 << 22
    assert grown < 90 << 20, f"grew by {grown >> 20} MiB"
    back = load_hf(folder)["model"]
    assert {name: hashlib.sha256(tensor.numpy()).digest() for name, tensor in back.items()} == digests
