from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import vescale_ckpt as vc
from tests.cases.inputs import assert_same, same_bits, tagged
from vescale_ckpt.errors import ConflictError
from vescale_ckpt.interop.dcp import DCPReader, DCPWriter
from vescale_storage import loop

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")


def native(store, state, step=1):
    with vc.Checkpointer(store, "run") as ckpt:
        ckpt.save(step, state)


def load(store, target, step=None, *, cast=False, **more):
    reader = DCPReader(store, "run", step, cast=cast)
    dcp.load(target, storage_reader=reader, no_dist=True, **more)
    return reader


def whole(store, **keys):
    """Return the whole state as torch's own tools build it: without a template."""
    target = {}
    reader = DCPReader(store, "run")
    _load_state_dict(target, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(**keys), no_dist=True)
    return target


def blank(state):
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return torch.full_like(state, -1) if isinstance(state, torch.Tensor) else type(state)()


STATE = {
    "model": {"a.weight": tagged(300, 200), "a.bias": tagged(30, dtype=torch.bfloat16)},
    "list": [tagged(3), {"x": tagged(2)}],
    "plain": {"step": 7, "lr": 0.1, "name": "é", "betas": (0.9, 0.95)},
    "scalar": torch.tensor(3.5),
}


@pytest.mark.parametrize("writer", ["native", "dcp"])
def test_what_was_saved_is_loaded_to_the_bit(store, writer):
    if writer == "native":
        native(store, STATE)
    else:
        dcp.save(STATE, storage_writer=DCPWriter(store, "run", 1), no_dist=True)
    target = blank(STATE)
    load(store, target)
    assert_same(target, STATE)


def test_the_step_is_the_one_asked_for_or_the_newest(store):
    for step in (1, 2, 10):
        native(store, {"w": torch.full((3,), float(step))}, step=step)
    for step, value in ((1, 1.0), (2, 2.0), (None, 10.0)):
        target = {"w": torch.zeros(3)}
        load(store, target, step)
        assert target["w"].eq(value).all()
    with pytest.raises(CheckpointException, match=r"cannot find 'run@7' .*steps 1, 2, 10"):
        load(store, {"w": torch.zeros(3)}, 7)


def test_one_reader_may_load_twice_and_sees_what_is_new(store):
    reader = DCPReader(store, "run")
    for step in (1, 2):
        native(store, {"w": torch.full((3,), float(step))}, step=step)
        target = {"w": torch.zeros(3)}
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert target["w"].eq(step).all()


def test_a_part_of_the_snapshot_reads_only_that_part(store):
    native(store, STATE)
    target = {"model": {"a.bias": torch.zeros(30, dtype=torch.bfloat16)}}
    reader = load(store, target)
    assert same_bits(target["model"]["a.bias"], STATE["model"]["a.bias"])
    assert reader.counters.bytes_read == 60


def test_a_missing_key_is_an_error_unless_partial_loads_are_allowed(store):
    native(store, {"w": tagged(3)})
    with pytest.raises(CheckpointException, match="odd"):
        load(store, {"w": torch.zeros(3), "odd": torch.zeros(2)})
    target = {"w": torch.zeros(3), "odd": torch.zeros(2)}
    load(store, target, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert same_bits(target["w"], tagged(3))
    assert not target["odd"].any()


def test_a_shape_that_differs_is_an_error(store):
    native(store, {"w": tagged(6)})
    with pytest.raises((CheckpointException, ValueError), match=r"[Ss]ize"):
        load(store, {"w": torch.zeros(2, 4)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_a_cast_is_refused_before_anything_is_filled_unless_asked_for(store, dtype):
    native(store, {"a": tagged(4), "w": tagged(4, 3) / 7})
    target = {"a": torch.zeros(4), "w": torch.zeros(4, 3, dtype=dtype)}
    with pytest.raises(CheckpointException) as caught:
        load(store, target)
    assert "'w': stored torch.float32" in str(caught.value)
    assert str(dtype) in str(caught.value)
    assert not target["a"].any()
    load(store, target, cast=True)
    assert same_bits(target["w"], (tagged(4, 3) / 7).to(dtype))
    assert same_bits(target["a"], tagged(4))


def test_without_a_template_the_whole_state_is_built(store):
    native(store, STATE)
    target = whole(store)
    assert same_bits(target["model"]["a.weight"], STATE["model"]["a.weight"])
    assert same_bits(target["model"]["a.bias"], STATE["model"]["a.bias"])
    assert same_bits(target["list"][1]["x"], tagged(2))
    assert target["plain"] == STATE["plain"]
    assert whole(store, keys={"plain"}) == {"plain": STATE["plain"]}


def test_a_model_and_its_optimizer_go_through_torchs_own_functions(store):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    native(store, {"model": model, "optimizer": optimizer, "epoch": 2})
    target = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    other = torch.optim.AdamW(target.parameters())
    model_state, optimizer_state = get_state_dict(target, other)
    state = {"model": model_state, "optimizer": optimizer_state, "epoch": 0}
    load(store, state)
    set_state_dict(target, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert state["epoch"] == 2
    assert_same(target.state_dict(), model.state_dict())
    for a, b in zip(model.parameters(), target.parameters(), strict=True):
        assert same_bits(other.state[b]["exp_avg"], optimizer.state[a]["exp_avg"])


@pytest.mark.parametrize("writer", ["native", "dcp"])
@pytest.mark.parametrize(
    "value",
    [
        {"a": {}, "b": {"c": 1}},
        [1, 2.5, "x"],
        [{"lr": 0.1, "betas": (0.9, 0.95), "names": ["a", "b"]}, {"lr": 0.2}],
        [[1, 2], [3, [4, 5]], []],
        [[{"deep": [1]}], 2],
        [(1, {"in": "a tuple"}), 3],
        (1, [2, {"x": None}]),
        {"groups": [], "none": None},
    ],
)
def test_containers_are_named_as_torch_names_them(store, writer, value):
    state = {"w": tagged(3), "value": value, "deep": {"list": [tagged(2), {"value": value}]}}
    if writer == "native":
        native(store, state)
    else:
        dcp.save(state, storage_writer=DCPWriter(store, "run", 1), no_dist=True)
    named, _ = flatten_state_dict(state)
    assert set(named) == set(DCPReader(store, "run").read_metadata().state_dict_metadata)
    target = {"w": torch.zeros(3), "value": copy.deepcopy(value), "deep": {"list": [torch.zeros(2), {"value": value}]}}
    load(store, target)
    assert_same(target, state)


def test_values_per_rank_beside_what_is_loaded_do_no_harm(store):
    native(store, {"w": tagged(3), "rng": vc.PerRank(torch.get_rng_state()), "loader": vc.PerRank({"at": 5})})
    target = {"w": torch.zeros(3)}
    load(store, target)
    assert same_bits(target["w"], tagged(3))


def test_damaged_bytes_never_reach_a_tensor(store):
    native(store, {"w": tagged(1000)})
    key = next(iter(_keys(store, "packs/")))
    content = bytearray(loop.run(store.backend.get(key)))
    content[5] ^= 1
    loop.run(store.backend.put(key, [bytes(content)]))
    target = {"w": torch.full((1000,), -1.0)}
    with pytest.raises(CheckpointException, match="digest"):
        load(store, target)
    assert target["w"].eq(-1).all()


def plans_of_two_looks(store, before, after):
    """Return a reader that looked before a newer snapshot came, its planner, and its plan of one that looked after."""
    native(store, before, step=1)
    state = {key: torch.zeros_like(value) for key, value in before.items()}
    reader, coordinator = DCPReader(store, "run"), DCPReader(store, "run")
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, reader.read_metadata(), False)
    plan = planner.create_local_plan()
    native(store, after, step=2)
    coordinator.read_metadata()
    (plan,) = coordinator.prepare_global_plan([plan])
    return reader, planner, plan, state


def test_all_ranks_read_the_snapshot_that_the_coordinator_opened(store):
    reader, planner, plan, state = plans_of_two_looks(store, {"w": tagged(5)}, {"w": tagged(5) + 1})
    reader.read_data(plan, planner).wait()
    assert same_bits(state["w"], tagged(5) + 1)


def test_snapshots_that_do_not_hold_the_same_are_not_mixed(store):
    reader, planner, plan, state = plans_of_two_looks(store, {"w": tagged(5)}, {"w": tagged(8)})
    with pytest.raises(ConflictError, match="name the step"):
        reader.read_data(plan, planner)
    assert not state["w"].any()


def test_torch_does_not_pick_it_for_a_path(tmp_path):
    assert DCPReader.validate_checkpoint_id(tmp_path) is False


def _keys(store, prefix):
    async def find():
        return [info.key async for info in store.backend.list(prefix)]

    return loop.run(find())
