from __future__ import annotations

import collections
import copy
import io
import random

import numpy as np
import pytest
import torch
from torch import nn

from vescale_ckpt.adapters.options import RestoreOptions
from vescale_ckpt.errors import StateError
from vescale_ckpt.state.per_rank import PerRank
from vescale_ckpt.state.sharded_view import ShardedView


def spoiled(memory, state):
    """Return a deep copy with other tensors, other numbers and no text."""
    state = copy.deepcopy(state)
    for _, value in memory.leaves(state):
        if isinstance(value, torch.Tensor) and value.numel():
            value.zero_()
    return state


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
    state, target = make(), spoiled(memory, make())
    before = {path: value for path, value in memory.leaves(target) if isinstance(value, torch.Tensor)}
    restore = memory.load(memory.save(state), target)
    memory.same_states(state, target)
    for path, value in memory.leaves(target):
        if isinstance(value, torch.Tensor):
            assert value is before[path], path  # filled where it is
    assert restore.notes == ()


@pytest.mark.parametrize("make", [non_contiguous, nested, dotted, arrays])
def test_planning_touches_nothing(memory, make):
    stored, target = memory.save(make()), spoiled(memory, make())
    before = copy.deepcopy(target)
    memory.plan(stored, target)
    memory.same_states(before, target)


def test_plain_values_may_change_their_type(memory):
    target = {"a": 0, "b": "x", "c": 1.5, "d": None, "e": None, "f": (1, None), "g": True}
    saved = {"a": 2.5, "b": None, "c": "y", "d": [1, {"k": (2,)}], "e": b"x" * 5000, "f": (None, 3), "g": 0}
    memory.load(memory.save(saved), target)
    memory.same_states(target, saved)


def test_lists_and_tuples_of_plain_values_may_change_their_length(memory):
    inner = []
    target = {"losses": inner, "state": (1, (2, 3)), "own": [[1], [2]]}
    saved = {"losses": [1.0, 2.0], "state": (9, (2, 3, 4)), "own": [[], [5, 6]]}
    memory.load(memory.save(saved), target)
    memory.same_states(target, saved)
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
    assert memory.problems(memory.save((1,)), (2,))
    assert memory.problems(memory.save(1), 2)


# disagreements


def test_missing_and_unexpected_keys_are_named(memory):
    stored = memory.save({"a": 1, "b": torch.zeros(1), "d": {"x": 1}})
    found = memory.problems(stored, {"a": 1, "c": torch.zeros(1), "d": {"x": 1, "y": {"z": 2}}})
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
    assert memory.problems(stored, {"other": nn.Linear(2, 2)}, only=("model",))  # asked for, and has no place


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
    (line,) = memory.problems(stored, target)
    assert "'w'" in line
    assert str(stored_dtype).removeprefix("torch.") in line
    assert str(target_dtype).removeprefix("torch.") in line
    assert "cast=True" in line
    restore = memory.load(stored, target, options=RestoreOptions(cast=True))
    assert torch.equal(target["w"], full.to(target_dtype))
    assert any("'w': cast from" in note for note in restore.notes)


def test_a_cast_never_drops_imaginary_parts(memory):
    stored = memory.save({"w": torch.zeros(2, dtype=torch.complex64)})
    assert memory.problems(stored, {"w": torch.zeros(2)}, cast=True)


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
    (line,) = memory.problems(memory.save(saved), target)
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
    (line,) = memory.problems(stored, {"w": target})
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
