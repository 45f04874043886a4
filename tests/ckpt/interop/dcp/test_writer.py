from __future__ import annotations

import io
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict

import vescale_ckpt as vc
from tests.cases.inputs import assert_same, bits, same_bits, tagged
from vescale_ckpt.errors import InvalidInputError, VeScaleError
from vescale_ckpt.interop.dcp import DCPReader, DCPWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")


def save(store, state, step=1, **more):
    return dcp.save(state, storage_writer=DCPWriter(store, "run", step), no_dist=True, **more)


def trained(seed=0, steps=2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.randn(5, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_a_snapshot_of_dcp_is_read_natively_with_its_nesting(store):
    state = {
        "model": OrderedDict({"a.weight": tagged(30, 20), "a.bias": tagged(30, dtype=torch.bfloat16)}),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "list": [tagged(3), {"x": tagged(2)}, 5],
        "plain": {"step": 7, "lr": 0.1, "name": "é", "none": None, "betas": (0.9, 0.95), "flags": [True, 1]},
        "strided": tagged(6, 8).t(),
    }
    save(store, state)
    found = store["run@1"].state_dict()
    assert same_bits(found["model"]["a.weight"], state["model"]["a.weight"])
    assert same_bits(found["model"]["a.bias"], state["model"]["a.bias"])
    assert found["plain"] == state["plain"]
    assert type(found["plain"]["betas"]) is tuple
    assert type(found["list"]) is list
    assert same_bits(found["list"][1]["x"], tagged(2))
    assert found["list"][2] == 5
    assert same_bits(found["scalar"], state["scalar"])
    assert found["none"].shape == (0, 4)
    assert torch.equal(found["strided"], state["strided"])
    assert store["run@1"].verify().ok


def test_what_dcp_saved_a_checkpointer_loads_into_modules_and_optimizers(store):
    model, optimizer = trained()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save(store, {"model": model_state, "optimizer": optimizer_state, "epoch": 3})
    target, other = trained(seed=9, steps=0)
    state = {"model": target, "optimizer": other, "epoch": 0}
    with vc.Checkpointer(store, "run") as ckpt:
        ckpt.load(state)
    assert state["epoch"] == 3
    assert_same(target.state_dict(), model.state_dict())
    for a, b in zip(model.parameters(), target.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert torch.equal(bits(other.state[b][key]), bits(value)), key
    assert other.param_groups[0]["lr"] == 1e-2


def test_every_bit_of_odd_dtypes(store):
    raw = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    names = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float32", "complex64", "uint16", "int64")
    state = {name: raw.view(getattr(torch, name)) for name in names}
    save(store, state)
    assert_same(store["run"].state_dict(), state)


def test_conjugates_are_what_they_look_like(store):
    z = torch.complex(tagged(4), tagged(4, start=9))
    save(store, {"z": z.conj()})
    assert torch.equal(store["run"].read("z"), z.conj().resolve_conj())


def test_equal_bytes_cost_nothing_again(store):
    state = {"w": tagged(500, 500), "v": tagged(300, 300)}
    save(store, state, step=1)
    before = {pack.name for pack in store["run@1"].manifest.packs}
    state["v"] += 1
    save(store, state, step=2)
    new = [pack for pack in store["run@2"].manifest.packs if pack.name not in before]
    assert sum(pack.size_bytes for pack in new) < 300 * 300 * 4 + 4096
    with vc.Checkpointer(store, "native") as ckpt:
        assert ckpt.save(1, state, base="run@2").result().bytes_written == 0


def test_a_step_again_is_a_new_version(store):
    for value in (1.0, 2.0):
        save(store, {"w": torch.full((3,), value)})
    assert store["run@1"].ref.version == 2
    assert store["run@1"].read("w").eq(2).all()


def test_metadata_and_ref_are_kept(store):
    writer = DCPWriter(store, "run", 5, metadata={"tokens": 12})
    dcp.save({"w": tagged(3)}, storage_writer=writer, no_dist=True)
    assert store["run@5"].metadata == {"tokens": 12}
    assert writer.ref == store["run@5"].ref


def test_tied_tensors_are_stored_once_in_bytes(store):
    p = tagged(300, 300)
    save(store, {"embed": p, "head": p})
    assert sum(pack.size_bytes for pack in store["run"].manifest.packs) < 300 * 300 * 4 + 4096
    found = store["run"].state_dict()
    assert same_bits(found["embed"], p)
    assert same_bits(found["head"], p)


def test_without_flattening_keys_are_taken_as_they_are(store):
    state = {"a.b": tagged(3), "c": 4}
    save(store, state, planner=DefaultSavePlanner(flatten_state_dict=False))
    assert_same(store["run"].state_dict(), state)


@pytest.mark.parametrize(
    "value", [np.arange(5.0), io.BytesIO(b"extra state"), io.BytesIO(b""), b"short", b"long" * 5000, np.float32(2.5)]
)
def test_arrays_and_bytes_are_carried_without_pickle(store, value):
    save(store, {"w": tagged(3), "w._extra_state": value})
    found = store["run"].state_dict()["w._extra_state"]
    assert type(found) is type(value)
    if isinstance(value, io.BytesIO):
        assert found.getvalue() == value.getvalue()
    else:
        assert np.array_equal(np.asarray(found), np.asarray(value))
    target = {"w": torch.zeros(3), "w._extra_state": None}
    dcp.load(target, storage_reader=DCPReader(store, "run"), no_dist=True)
    back = target["w._extra_state"]
    assert type(back) is type(value)
    content = back.getvalue() if isinstance(back, io.BytesIO) else np.asarray(back).tobytes()
    assert content == (value.getvalue() if isinstance(value, io.BytesIO) else np.asarray(value).tobytes())


def test_what_would_need_a_pickle_is_refused_by_name_and_nothing_shows(store):
    with pytest.raises(CheckpointException, match=r"cannot store .*'odd'"):
        save(store, {"w": tagged(3), "odd": object()})
    assert store.newest("run") is None
    save(store, {"w": tagged(3)})
    assert store["run"].step == 1


class PickledBytesOnly(DefaultSavePlanner):
    lookup_object = None


def test_a_planner_that_only_gives_pickled_bytes_is_refused(store):
    with pytest.raises(CheckpointException, match="gives pickled bytes"):
        save(store, {"w": tagged(3), "x": 1}, planner=PickledBytesOnly())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_dtype_that_no_store_holds_is_refused(store):
    with pytest.raises(CheckpointException, match="qint8"):
        save(store, {"q": torch.quantize_per_tensor(tagged(4), 0.1, 0, torch.qint8)})


@pytest.mark.parametrize("step", [-1, 1.0, True, None])
def test_a_step_that_is_none_is_refused(store, step):
    with pytest.raises(InvalidInputError):
        DCPWriter(store, "run", step)


def test_a_run_that_is_no_name_is_refused(store):
    with pytest.raises(VeScaleError):
        DCPWriter(store, "a/b", 1)


def test_torch_does_not_pick_it_for_a_path(tmp_path):
    assert DCPWriter.validate_checkpoint_id(tmp_path) is False


@pytest.fixture
def _fresh_plan_cache():
    caches = [name for name in vars(SavePlanner) if name.startswith("_cached")]
    before = {name: dict(getattr(SavePlanner, name)) for name in caches}
    yield
    for name, content in before.items():
        getattr(SavePlanner, name).clear()
        getattr(SavePlanner, name).update(content)


@pytest.mark.usefixtures("_fresh_plan_cache")
def test_cached_plans_write_the_new_values_under_the_new_step(store):
    for step in range(4):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"model": {"w": torch.full((40, 30), float(step))}, "step": step}
        if step == 3:
            state["model"]["late"] = torch.full((5,), 3.0)  # the plan changes
        save(store, state, step=step, planner=planner)
    for step in range(4):
        found = store[f"run@{step}"].state_dict()
        assert found["model"]["w"].eq(step).all()
        assert found["step"] == step
        assert ("late" in found["model"]) == (step == 3)


def test_async_save_has_the_values_of_the_call(store):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = torch.full((1000, 1000), 1.0)
        future = dcp.async_save({"w": weight, "step": 1}, storage_writer=DCPWriter(store, "run", 1))
        weight.add_(1)
        future.result()
        assert store["run@1"].read("w").eq(1).all()
    finally:
        dist.destroy_process_group()
