from __future__ import annotations

import collections
import copy
import io
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from vescale_ckpt.adapters.capture import capture
from vescale_ckpt.adapters.options import RestoreOptions
from vescale_ckpt.adapters.restore import unexpected_keys
from vescale_ckpt.errors import StateError
from vescale_ckpt.state.per_rank import PerRank
from vescale_ckpt.state.sharded_view import ShardedView


def same_bits(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(x, y)


def leaves(state, path=()):
    if isinstance(state, dict | list | tuple) and not isinstance(state, torch.Size):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, (*path, key))
    else:
        yield path, state


def assert_same(one, other):
    for (path, a), (twin, b) in zip(leaves(one), leaves(other), strict=True):
        assert path == twin
        if isinstance(a, torch.Tensor):
            assert same_bits(a, b), path
        elif isinstance(a, np.ndarray):
            assert np.array_equal(a, b), path
        elif isinstance(a, io.BytesIO):
            assert a.getvalue() == b.getvalue(), path
        else:
            assert a == b, path
            assert type(a) is type(b), path


def spoiled(state):
    """Return a deep copy with other tensors, other numbers and no text."""
    state = copy.deepcopy(state)
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor) and value.numel():
            value.zero_()
    return state


def problems(memory, stored, state, **more):
    options = RestoreOptions(**{k: more.pop(k) for k in ("cast", "only", "ignore", "rename") if k in more})
    return memory.plan(stored, state, options=options, **more).problems


# state dicts of all kinds


def non_contiguous():
    x = torch.arange(24.0).reshape(4, 6)
    image = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5)
    return {
        "transposed": x.t(),
        "columns": x[:, ::2],
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "permuted": image.permute(3, 0, 2, 1),
    }


def shapes():
    return {
        "scalar": torch.tensor(3.5),
        "scalar_int": torch.tensor(7),
        "empty": torch.empty(0),
        "empty_rows": torch.empty(0, 5),
        "empty_inner": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "one": torch.ones(1),
    }


def dtypes():
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn"
    return {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names.split()}


def nested():
    t = torch.arange(3.0)
    return {"a": [t, (t + 1, {"k": t + 2})], "none": None, "int": 3, "float": 0.1, "str": "x", "flag": True}


def dotted():
    return {"a.b": torch.tensor([1.0]), "a": {"b": torch.tensor([2.0])}, "a.0": torch.tensor([3.0])}


def int_keys():
    state = {i: {"step": torch.tensor(4.0), "exp_avg": torch.full((2,), float(i))} for i in range(2)}
    return {"state": state, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}, {"params": [1]}]}


def opaque():
    return {"w": torch.ones(2, 2), "x": io.BytesIO(b"\x00pickled"), "y": torch.empty(0, dtype=torch.uint8), "z": b""}


def arrays():
    return {"np": np.arange(6.0).reshape(2, 3), "scalar": np.float32(2.5), "big": bytes(range(256)) * 40}


def awkward_values():
    return {"big": 2**80, "zero": -0.0, "dtype": torch.bfloat16, "size": torch.Size((1, 2))}


@pytest.mark.parametrize(
    "make", [non_contiguous, shapes, dtypes, nested, dotted, int_keys, opaque, arrays, awkward_values]
)
def test_a_state_dict_comes_back_to_the_last_bit(memory, make):
    state, target = make(), spoiled(make())
    before = {path: value for path, value in leaves(target) if isinstance(value, torch.Tensor)}
    restore = memory.load(memory.save(state), target)
    assert_same(state, target)
    for path, value in leaves(target):
        if isinstance(value, torch.Tensor):
            assert value is before[path], path  # filled where it is
    assert restore.notes == ()


@pytest.mark.parametrize("make", [non_contiguous, nested, dotted, arrays])
def test_planning_touches_nothing(memory, make):
    stored, target = memory.save(make()), spoiled(make())
    before = copy.deepcopy(target)
    memory.plan(stored, target)
    assert_same(before, target)


def test_plain_values_may_change_their_type(memory):
    target = {"a": 0, "b": "x", "c": 1.5, "d": None, "e": None, "f": (1, None), "g": True}
    saved = {"a": 2.5, "b": None, "c": "y", "d": [1, {"k": (2,)}], "e": b"x" * 5000, "f": (None, 3), "g": 0}
    memory.load(memory.save(saved), target)
    assert_same(target, saved)


def test_lists_and_tuples_of_plain_values_may_change_their_length(memory):
    inner = []
    target = {"losses": inner, "state": (1, (2, 3)), "own": [[1], [2]]}
    saved = {"losses": [1.0, 2.0], "state": (9, (2, 3, 4)), "own": [[], [5, 6]]}
    memory.load(memory.save(saved), target)
    assert_same(target, saved)
    assert target["losses"] is inner


def test_a_tuple_with_tensors_keeps_them_and_takes_new_values(memory):
    x, y = torch.zeros(2), torch.zeros(2)
    target = {"t": (x, 1, [y, (2, "s")])}
    memory.load(memory.save({"t": (torch.ones(2), 5, [torch.ones(2), (6, "z")])}), target)
    assert target["t"][0] is x
    assert target["t"][2][0] is y
    assert x.tolist() == y.tolist() == [1.0, 1.0]
    assert (target["t"][1], target["t"][2][1]) == (5, (6, "z"))


def test_a_named_tuple_in_the_target_stays_one(memory):
    point = collections.namedtuple("point", "x y")  # noqa: PYI024
    target = {"p": point(1, 2)}
    memory.load(memory.save({"p": (3, 4)}), target)
    assert target["p"] == point(3, 4)
    assert type(target["p"]) is point


def test_the_random_state_of_python_comes_back(memory):
    random.seed(5)
    saved = {"py": random.getstate()}
    expected = random.random()
    target = {"py": random.getstate()}
    memory.load(memory.save(saved), target)
    random.setstate(target["py"])
    assert random.random() == expected


def test_a_numpy_target_is_filled_in_place_and_a_stream_is_replaced(memory):
    array, stream = np.zeros((2, 3)), io.BytesIO(b"old and longer")
    memory.load(memory.save({"a": np.arange(6.0).reshape(2, 3), "s": io.BytesIO(b"new")}), {"a": array, "s": stream})
    assert array.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert (stream.getvalue(), stream.tell()) == (b"new", 0)


def test_arrays_of_torch_and_numpy_fill_each_other(memory):
    target = {"a": torch.zeros(3), "b": np.zeros(3)}
    memory.load(memory.save({"a": np.arange(3, dtype=np.float32), "b": torch.arange(3.0).double()}), target)
    assert target["a"].tolist() == target["b"].tolist() == [0.0, 1.0, 2.0]


def test_explicit_offsets_are_filled(memory):
    full = torch.arange(24.0).reshape(8, 3)
    stored = memory.save({"w": full})
    local, other = torch.zeros(4, 3), torch.zeros(1, 2)
    memory.load(stored, {"w": ShardedView((8, 3), torch.float32, [((1, 0), local), ((6, 1), other)])})
    assert torch.equal(local, full[1:5])
    assert torch.equal(other, full[6:7, 1:3])


def test_a_root_that_is_a_module_or_a_list(memory):
    saved, target = nn.Linear(2, 2), nn.Linear(2, 2)
    memory.load(memory.save(saved), target)
    assert torch.equal(saved.weight, target.weight)
    numbers = [1, 2]
    memory.load(memory.save([3, 4, 5]), numbers)
    assert numbers == [3, 4, 5]
    assert problems(memory, memory.save((1,)), (2,))
    assert problems(memory, memory.save(1), 2)


# disagreements


def test_missing_and_unexpected_keys_are_named(memory):
    stored = memory.save({"a": 1, "b": torch.zeros(1), "d": {"x": 1}})
    found = problems(memory, stored, {"a": 1, "c": torch.zeros(1), "d": {"x": 1, "y": {"z": 2}}})
    assert len(found) == 3
    assert any(line.startswith("missing 'c'") for line in found)
    assert any(line.startswith("missing 'd.y'") for line in found)
    assert any(line.startswith("unexpected 'b'") for line in found)
    assert all("ignore=" in line for line in found)


def test_ignore_allows_them_and_leaves_the_target_alone(memory):
    stored = memory.save({"a": torch.ones(1), "b": torch.zeros(1), "d": {"x": 1}})
    target = {"a": torch.zeros(1), "c": torch.zeros(1), "d": {"x": 5, "y": 2}}
    restore = memory.load(stored, target, options=RestoreOptions(ignore=("b", "c", "d.?")))
    assert target == {"a": torch.ones(1), "c": torch.zeros(1), "d": {"x": 5, "y": 2}}
    assert any("'d.?'" in note for note in restore.notes)


def test_only_leaves_the_rest_alone(memory):
    stored = memory.save({"model": nn.Linear(2, 2), "epoch": 3, "lost": torch.zeros(1)})
    model = nn.Linear(2, 2)
    bias = model.bias.detach().clone()
    target = {"model": model, "epoch": 0, "new": {"x": torch.zeros(1)}}
    memory.load(stored, target, options=RestoreOptions(only=("model.weight",)))
    assert torch.equal(model.weight, stored.full["model", "weight"])
    assert torch.equal(model.bias, bias)
    assert target["epoch"] == 0
    assert problems(memory, stored, {"other": nn.Linear(2, 2)}, only=("model",))  # asked for, and has no place


@pytest.mark.parametrize(
    ("stored_dtype", "target_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.int64, torch.int32),
        (torch.float32, torch.bool),
        (torch.float32, torch.complex64),
    ],
)
def test_a_dtype_is_cast_only_when_asked_and_then_told(memory, stored_dtype, target_dtype):
    full = (torch.arange(12).reshape(4, 3) * 100).to(stored_dtype)
    stored, target = memory.save({"w": full}), {"w": torch.zeros(4, 3, dtype=target_dtype)}
    (line,) = problems(memory, stored, target)
    assert "'w'" in line
    assert str(stored_dtype).removeprefix("torch.") in line
    assert str(target_dtype).removeprefix("torch.") in line
    assert "cast=True" in line
    restore = memory.load(stored, target, options=RestoreOptions(cast=True))
    assert torch.equal(target["w"], full.to(target_dtype))
    assert any("'w': cast from" in note for note in restore.notes)


def test_a_cast_never_drops_imaginary_parts(memory):
    stored = memory.save({"w": torch.zeros(2, dtype=torch.complex64)})
    assert problems(memory, stored, {"w": torch.zeros(2)}, cast=True)


@pytest.mark.parametrize(
    ("saved", "target", "words"),
    [
        ({"x": torch.zeros(3)}, {"x": torch.zeros(4)}, ["[4]", "[3]"]),
        ({"x": torch.zeros(3)}, {"x": torch.zeros(1, 3)}, ["[1, 3]", "[3]"]),
        ({"x": torch.zeros(())}, {"x": torch.zeros(1)}, ["[1]", "[]"]),
        ({"x": torch.zeros(3)}, {"x": 1.0}, ["a float", "a tensor"]),
        ({"x": torch.zeros(3)}, {"x": None}, ["NoneType", "a tensor"]),
        ({"x": 1.0}, {"x": torch.zeros(())}, ["an array", "1.0"]),
        ({"x": [1]}, {"x": (1,)}, ["a tuple", "a list"]),
        ({"x": {"a": 1}}, {"x": [1]}, ["a list", "a dict"]),
        ({"x": [torch.zeros(1)]}, {"x": [torch.zeros(1)] * 2}, ["a list of 2", "a list of 1"]),
        ({"x": [1, 2]}, {"x": [torch.zeros(1)]}, ["a list of 1", "a list of 2"]),
        ({"x": 3}, {"x": nn.Linear(1, 1)}, ["a module (Linear)", "3"]),
        ({"x": 3}, {"x": {"a": 1}}, ["a dict", "3"]),
        ({"x": {"a": 1}}, {"x": 3}, ["a int", "a dict"]),
        ({"x": PerRank(3)}, {"x": 3}, ["'x'", "per rank"]),
        ({"x": 3}, {"x": PerRank(3)}, ["per rank", "3"]),
        ({"x": torch.zeros(3)}, {"x": io.BytesIO()}, ["BytesIO", "a tensor"]),
        ({"x": io.BytesIO(b"abc")}, {"x": torch.zeros(3, dtype=torch.uint8)}, ["tensor", "bytes_io"]),
        ({"x": io.BytesIO(b"abc")}, {"x": b"abc"}, ["a bytes", "a tensor"]),
    ],
)
def test_a_different_kind_or_shape_is_one_clear_line(memory, saved, target, words):
    (line,) = problems(memory, memory.save(saved), target)
    assert line.startswith("'x':")
    assert all(word in line for word in words), line


def read_only():
    array = np.zeros(2)
    array.flags.writeable = False
    return array


def inference():
    with torch.inference_mode():
        return torch.zeros(2)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (lambda: torch.zeros(1).expand(2), "share memory"),
        (lambda: torch.zeros(3).as_strided((2, 2), (1, 1)), "share memory"),
        (lambda: torch.zeros(2, device="meta"), "meta device"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "conjugated"),
        (inference, "inference"),
        (lambda: nn.LazyLinear(2).weight, "not initialised"),
        (lambda: torch.zeros(2).to_sparse(), "sparse"),
        (read_only, "read-only"),
        (lambda: np.zeros(4)[::-2], "strides"),
    ],
)
def test_memory_that_cannot_be_filled_is_a_problem(memory, target, reason):
    target = target()
    saved = torch.zeros(2, 2) if target.ndim == 2 else torch.zeros(2)
    if isinstance(target, torch.Tensor) and target.is_complex():
        saved = saved.to(torch.complex64)
    stored = memory.save({"w": saved.numpy().astype(np.float64) if isinstance(target, np.ndarray) else saved})
    (line,) = problems(memory, stored, {"w": target})
    assert "'w'" in line
    assert reason in line


def test_all_problems_are_listed_and_nothing_can_be_finished(memory):
    stored = memory.save({"a": torch.zeros(1), "b": 1, "c": torch.zeros(2), "d": [torch.zeros(1)]})
    target = {"a": torch.ones(2), "b": torch.ones(1), "e": 1, "c": torch.ones(2, dtype=torch.int32), "d": (1,)}
    restore = memory.plan(stored, target)
    assert len(restore.problems) == 5
    with pytest.raises(StateError, match="5 problems"):
        restore.finish()


def test_a_restore_finishes_once(memory):
    restore = memory.load(memory.save({"a": 1}), {"a": 0})
    with pytest.raises(StateError, match="finished already"):
        restore.finish()


# modules


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_module_is_filled_in_place(memory):
    saved, target = net(1), net(2)
    saved(torch.ones(5, 3))
    before = [(p, p.data_ptr()) for p in target.parameters()]
    memory.load(memory.save({"m": saved}), {"m": target})
    assert_same(dict(saved.state_dict()), dict(target.state_dict()))
    assert [(p, p.data_ptr()) for p in target.parameters()] == before
    assert all(p.requires_grad and p.grad is None for p in target.parameters())


def test_modules_and_their_state_dicts_are_the_same_in_a_store(memory):
    saved, target = net(1), net(2)
    memory.load(memory.save({"m": saved.state_dict()}), {"m": target})
    assert_same(dict(saved.state_dict()), dict(target.state_dict()))
    other = net(3).state_dict()
    memory.load(memory.save({"m": saved}), {"m": other})
    assert_same(dict(saved.state_dict()), dict(other))


def test_a_compiled_module_loads_what_a_plain_one_saved(memory):
    saved, target = net(1), net(2)
    memory.load(memory.save({"m": saved}), {"m": torch.compile(target, backend="eager")})
    assert torch.equal(saved[0].weight, target[0].weight)


def test_keys_of_modules_that_do_not_meet(memory):
    stored = memory.save({"m": net()})
    target = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 2), nn.Linear(1, 1))
    found = problems(memory, stored, {"m": target})
    assert [line.split(":")[0] for line in found] == [
        "missing 'm.3.weight'",
        "missing 'm.3.bias'",
        *(f"unexpected 'm.1.{name}'" for name in net()[1].state_dict()),
    ]
    assert problems(memory, stored, {"m": target}, ignore=("m.1", "m.3")) == ()


def test_ranks_may_hold_parts_and_what_none_holds_is_unexpected(memory):
    stored = memory.save({"m": net()})
    parts = [nn.ModuleDict({name: net()[int(name)]}) for name in "02"]
    restores = [memory.plan(stored, {"m": part}, rank=r, world_size=2) for r, part in enumerate(parts)]
    assert [restore.problems for restore in restores] == [(), ()]
    lines = unexpected_keys(stored.tree, restores[0].taken | restores[1].taken, RestoreOptions())
    assert all("'m.1." in line for line in lines)
    assert len(lines) == 5
    assert unexpected_keys(stored.tree, restores[0].taken, RestoreOptions(ignore=("m",))) == ()


class Tied(nn.Module):
    def __init__(self, tie=True):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        if tie:
            self.b.weight = self.a.weight


def test_a_tie_on_both_sides_is_filled_once(memory):
    saved, target = Tied(), Tied()
    stored = memory.save({"m": saved})
    restore = memory.load(stored, {"m": target})
    assert sum(bool(leaf.pieces) for leaf in restore.leaves) == 3
    (alias,) = [leaf for leaf in restore.leaves if leaf.alias_of]
    assert (alias.path, alias.alias_of) == (("m", "b.weight"), ("m", "a.weight"))
    assert target.a.weight is target.b.weight
    assert torch.equal(target.b.weight, saved.a.weight)


def test_a_stored_tie_fills_two_tensors_of_the_target(memory):
    saved, target = Tied(), Tied(tie=False)
    memory.load(memory.save({"m": saved}), {"m": target})
    assert torch.equal(target.a.weight, saved.a.weight)
    assert torch.equal(target.b.weight, saved.a.weight)
    assert target.a.weight is not target.b.weight


def test_a_name_that_is_not_stored_is_filled_through_its_tie(memory):
    for left_out in ("a.weight", "b.weight"):
        state = {k: v for k, v in Tied().state_dict().items() if k != left_out}
        target = Tied()
        restore = memory.load(memory.save({"m": state}), {"m": target})
        assert torch.equal(target.a.weight, next(v for k, v in state.items() if k.endswith("weight")))
        assert any(f"'m.{left_out}' is not stored" in note for note in restore.notes)


def test_two_stored_tensors_for_one_of_the_target_must_be_equal(memory):
    saved, target = Tied(tie=False), Tied()
    stored = memory.save({"m": saved})
    (line,) = problems(memory, stored, {"m": target})
    assert "'m.b.weight'" in line
    assert "'m.a.weight'" in line
    assert problems(memory, stored, {"m": target}, ignore=("m.b.weight",)) == ()
    asked = []
    assert problems(memory, stored, {"m": target}, same_content=lambda *pair: asked.append(pair) is None) == ()
    assert asked == [(("m", "a.weight"), ("m", "b.weight"))]
    assert problems(memory, stored, {"m": target}, same_content=lambda *_: False)


class WithExtra(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


@pytest.mark.parametrize(
    "value", [{"amax": torch.arange(4.0), "n": 1}, io.BytesIO(b"xy"), torch.empty(0, dtype=torch.uint8), b"", None, 3]
)
def test_extra_state_is_given_back(memory, value):
    target = WithExtra(copy.deepcopy(value))
    if isinstance(value, dict):
        target.value["amax"].zero_()
    memory.load(memory.save({"m": WithExtra(value)}), {"m": target})
    assert_same({"v": target.value}, {"v": value})


def test_extra_state_that_is_not_stored_is_a_problem_unless_ignored(memory):
    plain = nn.Module()
    plain.w = nn.Parameter(torch.zeros(2))
    stored = memory.save({"m": plain})
    (line,) = problems(memory, stored, {"m": WithExtra(1)})
    assert "missing 'm._extra_state'" in line
    target = WithExtra(1)
    memory.load(stored, {"m": target}, options=RestoreOptions(ignore=("*._extra_state",)))
    assert target.value == 1
    (line,) = problems(memory, memory.save({"m": WithExtra(b"x")}), {"m": plain})
    assert "unexpected 'm._extra_state'" in line


# renames


def test_a_subtree_is_loaded_from_under_another_name(memory):
    saved = nn.ModuleDict({"enc": nn.Linear(2, 2), "out": nn.Linear(2, 1)})
    target = nn.ModuleDict({"encoder": nn.Linear(2, 2), "out": nn.Linear(2, 1)})
    stored = memory.save({"model": saved})
    assert problems(memory, stored, {"model": target})
    options = RestoreOptions(rename={"model.encoder": "model.enc"})
    restore = memory.load(stored, {"model": target}, options=options)
    assert torch.equal(saved["enc"].weight, target["encoder"].weight)
    assert any("'model.encoder': loaded from 'model.enc'" in note for note in restore.notes)


def test_a_whole_level_is_renamed_or_added(memory):
    saved, target = nn.Linear(2, 2), nn.Linear(2, 2)
    memory.load(memory.save({"net": saved}), {"model": target}, options=RestoreOptions(rename={"model": "net"}))
    assert torch.equal(saved.weight, target.weight)
    target = nn.Linear(2, 2)
    options = RestoreOptions(rename={"model.weight": "weight", "model.bias": "bias"})
    memory.load(memory.save(saved), {"model": target}, options=options)
    assert torch.equal(saved.weight, target.weight)


def test_a_renamed_name_that_is_not_stored_is_missing(memory):
    stored = memory.save({"m": nn.Linear(1, 1)})
    found = problems(memory, stored, {"m": nn.Linear(1, 1)}, rename={"m.weight": "m.kernel"})
    assert [line.split(":")[0] for line in found] == ["missing 'm.weight'", "unexpected 'm.weight'"]


def test_a_renamed_name_that_two_places_share_is_a_problem(memory):
    stored = memory.save(dotted())
    found = problems(memory, stored, {"x": torch.zeros(1)}, rename={"x": "a.b"}, ignore=("a.0", "a"))
    assert any("2 places" in line for line in found)


# per rank


def save_per_rank(memory, values):
    return memory.store({rank: capture({"own": PerRank(value)}, rank=rank) for rank, value in enumerate(values)})


def test_every_rank_gets_its_own(memory):
    stored = save_per_rank(memory, [{"rng": torch.full((2,), float(r)), "pos": r} for r in range(3)])
    for rank in range(3):
        inner = {"rng": torch.zeros(2), "pos": None}
        target = {"own": PerRank(inner)}
        memory.load(stored, target, rank=rank, world_size=3)
        assert target["own"].value is inner
        assert inner["rng"].tolist() == [rank, rank]
        assert inner["pos"] == rank


def test_a_plain_value_per_rank_is_wrapped_again(memory):
    target = {"own": PerRank(0)}
    memory.load(save_per_rank(memory, [5, 6]), target, rank=1, world_size=2)
    assert target["own"] == PerRank(6)


def test_nothing_per_rank_takes_whatever_the_rank_had(memory):
    target = {"own": PerRank(None)}
    memory.load(save_per_rank(memory, [[torch.ones(2), 1]]), target)
    assert torch.equal(target["own"].value[0], torch.ones(2))
    assert target["own"].value[1] == 1


def test_another_number_of_ranks_is_a_problem_unless_ignored(memory):
    stored = save_per_rank(memory, [5, 6])
    for rank, world_size in ((0, 1), (0, 3), (2, 3)):
        (line,) = problems(memory, stored, {"own": PerRank(0)}, rank=rank, world_size=world_size)
        assert "'own'" in line
        assert "of 2 ranks" in line
        assert f"of {world_size}" in line
        target = {"own": PerRank(0)}
        memory.load(stored, target, rank=rank, world_size=world_size, options=RestoreOptions(ignore=("own",)))
        assert target["own"].value == 0


def test_the_number_of_ranks_that_saved_may_be_told(memory):
    stored = memory.store({0: capture({"own": PerRank(1)}, rank=0)})
    assert problems(memory, stored, {"own": PerRank(0)}, rank=0, world_size=2, saved_world_size=2) == ()
    assert problems(memory, stored, {"own": PerRank(0)}, rank=1, world_size=2, saved_world_size=2)


# objects with state_dict


class Loader:
    def __init__(self, position=0, buffer=(), order=None):
        self.position, self.buffer, self.order = position, list(buffer), order

    def state_dict(self):
        return {"position": self.position, "buffer": self.buffer, "order": self.order}

    def load_state_dict(self, state):
        self.position, self.buffer, self.order = state["position"], state["buffer"], state["order"]


def test_an_object_gets_what_it_gave(memory):
    saved = Loader(7, ["a", {"k": (1,)}], torch.arange(5))
    target = Loader()
    memory.load(memory.save({"loader": saved}), {"loader": target})
    assert (target.position, target.buffer) == (7, ["a", {"k": (1,)}])
    assert torch.equal(target.order, torch.arange(5))


def test_an_objects_own_tensors_are_filled_in_place_where_they_fit(memory):
    order = torch.zeros(5, dtype=torch.int64)
    target = Loader(order=order)
    memory.load(memory.save({"loader": Loader(order=torch.arange(5))}), {"loader": target})
    assert target.order is order
    assert order.tolist() == [0, 1, 2, 3, 4]


def test_an_objects_tensor_that_is_not_stored_is_missing(memory):
    class More(Loader):
        def state_dict(self):
            return super().state_dict() | {"extra": torch.zeros(1)}

    (line,) = problems(memory, memory.save({"loader": Loader()}), {"loader": More()})
    assert "missing 'loader.extra'" in line


def test_an_object_may_hold_modules_and_optimizers(memory):
    class App:
        def __init__(self, seed):
            self.model = net(seed)
            self.loaded = None

        def state_dict(self):
            return {"model": self.model.state_dict(), "live": self.model, "step": 3}

        def load_state_dict(self, state):
            self.loaded = state

    saved, target = App(1), App(2)
    memory.load(memory.save({"app": saved}), {"app": target})
    assert torch.equal(saved.model[0].weight, target.model[0].weight)
    assert target.loaded["live"] is target.model
    assert target.loaded["step"] == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=50),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[2],
        ),
        lambda o: torch.optim.lr_scheduler.ChainedScheduler(
            [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_schedulers_go_on_as_if_nothing_had_happened(memory, make):
    def start():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "scheduler": make(optimizer)}

    def advance(state, times):
        rates = []
        for _ in range(times):
            state["optimizer"].step()
            plateau = isinstance(state["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau)
            state["scheduler"].step(*([1.0] if plateau else []))
            rates.append(state["optimizer"].param_groups[0]["lr"])
        return rates

    saved, target = start(), start()
    advance(saved, 3)
    memory.load(memory.save(saved), target)
    assert type(target["scheduler"].__dict__.get("milestones")) is type(saved["scheduler"].__dict__.get("milestones"))
    assert advance(target, 6) == advance(saved, 6)


def test_a_scaler_goes_on(memory):
    saved, target = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0))
    memory.load(memory.save({"scaler": saved}), {"scaler": target})
    assert target.get_scale() == 8.0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_that_was_off_does_not_load_into_one_that_is_on(memory, enabled):
    saved, target = (torch.amp.GradScaler("cpu", enabled=on) for on in (enabled, not enabled))
    (line,) = problems(memory, memory.save({"scaler": saved}), {"scaler": target})
    assert line.startswith("'scaler':")
    assert f"saved {'enabled' if enabled else 'disabled'}" in line


def test_keys_in_which_an_objects_state_differs_are_noted(memory):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    saved = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    target = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    restore = memory.load(memory.save({"s": saved}), {"s": target})
    assert any("'s': 1 keys of its state the target has not: step_size" in note for note in restore.notes)


def test_a_function_that_a_scheduler_holds_stays(memory):
    class Mine(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer, factor):
            self.shape = lambda k: k * factor
            super().__init__(optimizer)

        def get_lr(self):
            return [0.1]

    saved, target = (Mine(torch.optim.SGD([torch.zeros(1)], lr=0.1), factor) for factor in (2, 3))
    memory.load(memory.save({"s": saved}), {"s": target})
    assert target.shape(1) == 3


def test_what_runs_code_of_others_is_installed_last(memory):
    seen = []

    class Watches(Loader):
        def load_state_dict(self, state):  # noqa: ARG002
            seen.append((target["epoch"], target["optimizer"].param_groups[0]["lr"], target["model"].value))

    def make(epoch, lr):
        model = WithExtra(epoch)
        return {
            "loader": Watches(),
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=lr),
            "epoch": epoch,
        }

    target = make(0, 0.1)
    memory.load(memory.save(make(4, 0.5)), target)
    assert seen == [(4, 0.5, 4)]


# subclasses


def test_a_subclass_of_several_tensors_is_filled(memory):
    saved = {"w": TwoTensor(torch.ones(2), torch.full((2,), 2.0))}
    target = {"w": TwoTensor(torch.zeros(2), torch.zeros(2))}
    memory.load(memory.save(saved), target)
    assert target["w"].a.tolist() == [1.0, 1.0]
    assert target["w"].b.tolist() == [2.0, 2.0]
    (line,) = problems(memory, memory.save(saved), {"w": torch.zeros(2)})
    assert "'w'" in line
    (line,) = problems(memory, memory.save({"w": torch.zeros(2)}), target)
    assert "'w'" in line
