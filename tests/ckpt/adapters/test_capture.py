from __future__ import annotations

import collections
import io
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from tests.modules import WithExtra
from vescale_ckpt.adapters.capture import SUBCLASS_KEY, capture, is_stateful
from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.state.leaf import Holding, LeafKind
from vescale_ckpt.state.per_rank import PerRank
from vescale_ckpt.state.sharded_view import ShardedView
from vescale_ckpt.state.tree import (
    DictKind,
    DictNode,
    ListNode,
    PerRankNode,
    TensorNode,
    TupleNode,
    ValueNode,
    get,
    walk,
)


def paths(captured):
    return [leaf.path for leaf in captured.leaves]


def refusal(state):
    with pytest.raises(InvalidInputError) as caught:
        capture(state, rank=0)
    return str(caught.value)


# trees


def test_containers_values_and_arrays():
    x = torch.arange(3.0)
    state = {"a": [x, (x + 1, {"k": x + 2})], "none": None, "int": 3, "float": 0.1, "str": "x", "flag": True, 7: b"b"}
    captured = capture(state, rank=0)
    assert captured.tree == DictNode((
        ("a", ListNode((TensorNode(), TupleNode((TensorNode(), DictNode((("k", TensorNode()),)))))),),
        ("none", ValueNode(None)),
        ("int", ValueNode(3)),
        ("float", ValueNode(0.1)),
        ("str", ValueNode("x")),
        ("flag", ValueNode(True)),
        (7, ValueNode(b"b")),
    ))  # fmt: skip
    assert paths(captured) == [("a", 0), ("a", 1, 0), ("a", 1, 1, "k")]


def test_there_is_one_leaf_for_every_tensor_node_in_the_trees_order():
    state = {
        "model": nn.LSTM(2, 2),
        "x": [torch.zeros(1), np.zeros(1), io.BytesIO(b"1")],
        "own": PerRank(torch.ones(1)),
    }
    captured = capture(state, rank=3)
    assert paths(captured) == [path for path, node in walk(captured.tree) if isinstance(node, TensorNode)]


def test_dotted_keys_are_not_nested_keys():
    captured = capture({"a.b": torch.tensor([1.0]), "a": {"b": torch.tensor([2.0])}}, rank=0)
    assert paths(captured) == [("a.b",), ("a", "b")]
    assert [leaf.pieces[0].view.item() for leaf in captured.leaves] == [1.0, 2.0]


def test_dict_classes_are_kept_and_a_default_factory_is_noted():
    state = {
        "ordered": collections.OrderedDict(a=1),
        "counts": collections.Counter("aab"),
        "default": collections.defaultdict(list, a=[1]),
    }
    captured = capture(state, rank=0)
    kinds = [node.kind for _, node in captured.tree.items]
    assert kinds == [DictKind.ORDERED, DictKind.COUNTER, DictKind.DICT]
    assert "'default'" in captured.notes[0]


def test_kinds_of_arrays():
    captured = capture({"np": np.arange(2), "io": io.BytesIO(b"ab"), "big": bytes(9000), "small": b"x"}, rank=0)
    assert [(leaf.path[0], leaf.kind) for leaf in captured.leaves] == [
        ("np", LeafKind.NUMPY),
        ("io", LeafKind.BYTES_IO),
        ("big", LeafKind.BYTES),
    ]


def test_python_and_torch_random_states_are_plain_or_tensors():
    captured = capture({"py": random.getstate(), "torch": torch.get_rng_state()}, rank=0)
    assert paths(captured) == [("torch",)]
    assert isinstance(get(captured.tree, ("py", 1)), TupleNode)


def test_all_refusals_are_in_one_error():
    loop = []
    loop.append(loop)
    state = {"a": {1, 2}, "b": torch.zeros(1, device="meta"), "c": loop, "d": {(1,): 2}, "ok": 1, "m": nn.LazyLinear(1)}
    with pytest.raises(InvalidInputError) as caught:
        capture(state, rank=0)
    problems = caught.value.context["problems"]
    assert len(problems) == 6  # a lazy layer has two parameters
    for key in ("'a'", "'b'", "'c", "'d'", "'m.weight'", "'m.bias'"):
        assert any(key in problem for problem in problems), key


# ties


def test_a_tie_is_stored_once_under_its_first_name():
    p = nn.Parameter(torch.arange(12.0).reshape(4, 3))
    first, second = capture({"embed.weight": p, "head.weight": p}, rank=0).leaves
    assert len(first.pieces) == 1
    assert first.alias_of is None
    assert (second.alias_of, second.pieces) == (("embed.weight",), ())
    assert second.global_shape == (4, 3)


def test_ties_are_seen_through_detach_and_across_modules_and_dicts():
    model = nn.Linear(2, 2)
    captured = capture({"model": model, "copy": model.state_dict(), "ema": {"w": model.weight.clone()}}, rank=0)
    aliases = {leaf.path: leaf.alias_of for leaf in captured.leaves}
    assert aliases["copy", "weight"] == ("model", "weight")
    assert aliases["copy", "bias"] == ("model", "bias")
    assert aliases["ema", "w"] is None


def test_views_of_one_storage_are_their_own_bytes_and_no_ties():
    base = torch.arange(1_000_000, dtype=torch.float32)
    state = {"slice": base[10:20], "row": base.view(1000, 1000)[3], "chunk": torch.chunk(base, 10)[7]}
    leaves = capture(state, rank=0).leaves
    assert [leaf.pieces[0].view.numel() for leaf in leaves] == [10, 1000, 100_000]
    assert all(leaf.alias_of is None for leaf in leaves)


def test_empty_tensors_are_not_tied():
    x = torch.empty(0)
    assert all(leaf.alias_of is None for leaf in capture({"a": x, "b": x}, rank=0).leaves)


def test_a_value_per_rank_is_not_tied_to_a_shared_one():
    x = torch.ones(2)
    shared, own, twin = capture({"x": x, "own": PerRank([x, x])}, rank=1).leaves
    assert shared.alias_of is None
    assert own.alias_of is None
    assert twin.alias_of == ("own", 1, 0)


def test_temporary_tensors_do_not_tie_by_chance():
    class Makes:
        def state_dict(self):
            return {str(i): torch.full((3,), float(i)) for i in range(50)}

        def load_state_dict(self, state):
            pass

    captured = capture({str(i): Makes() for i in range(20)}, rank=0)
    assert all(leaf.alias_of is None for leaf in captured.leaves)


# modules


def test_a_module_is_a_union_by_global_name():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    captured = capture({"model": model}, rank=0)
    node = get(captured.tree, ("model",))
    assert node.union
    assert [key for key, _ in node.items] == list(model.state_dict())
    assert all(leaf.holding is Holding.REPLICATED for leaf in captured.leaves)


def test_a_module_may_be_the_state_itself():
    assert paths(capture(nn.Linear(1, 1), rank=0)) == [("weight",), ("bias",)]


def test_extra_state_is_any_value():
    for value in ({"amax": torch.ones(4), "n": 1}, io.BytesIO(b"xy"), torch.empty(0, dtype=torch.uint8), b"", None):
        captured = capture({"m": nn.Sequential(WithExtra(value))}, rank=0)
        assert get(captured.tree, ("m", "0._extra_state")) is not None
    assert ("m", "0._extra_state", "amax") not in paths(captured)
    assert ("m", "0._extra_state", "amax") in paths(
        capture({"m": nn.Sequential(WithExtra({"amax": torch.ones(4)}))}, rank=0)
    )


def test_names_that_meet_without_wrappers_are_refused():
    class Odd(nn.Module):
        pass

    odd = Odd()
    odd.a = nn.Linear(1, 1)
    odd._parameters["a.weight"] = nn.Parameter(torch.zeros(1))
    assert "'a.weight'" in refusal({"m": odd})


def test_a_pipeline_stage_is_its_module(fake_world):
    from torch.distributed.pipelining import PipelineStage  # noqa: PLC0415

    fake_world(1, 2)
    stage = PipelineStage(nn.Sequential(nn.Linear(2, 2)), 1, 2, torch.device("cpu"))
    assert paths(capture({"model": stage}, rank=1)) == [("model", "0.weight"), ("model", "0.bias")]


# optimizers


def stepped(optimizer, model):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def test_an_optimizer_is_stored_by_name():
    model = nn.Linear(2, 2)
    optimizer = stepped(torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.9, 0.95)), model)
    captured = capture({"optimizer": optimizer, "nested": [model]}, rank=0)
    node = get(captured.tree, ("optimizer", "state"))
    assert node.union
    assert [key for key, _ in node.items] == ["weight", "bias"]
    assert node.items[0][1].union
    assert [key for key, _ in node.items[0][1].items] == ["step", "exp_avg", "exp_avg_sq"]
    group = get(captured.tree, ("optimizer", "param_groups", 0))
    options = dict(group.items)
    assert options["params"] == DictNode((("weight", ValueNode(None)), ("bias", ValueNode(None))), union=True)
    assert options["lr"] == ValueNode(0.5)
    assert options["betas"] == TupleNode((ValueNode(0.9), ValueNode(0.95)))
    assert set(options) == set(optimizer.param_groups[0])


def test_absent_state_stays_absent_and_is_not_made_by_looking():
    model = nn.Linear(2, 2)
    model.unused = nn.Parameter(torch.ones(3))
    optimizer = stepped(torch.optim.AdamW(model.parameters()), model)
    fresh = torch.optim.AdamW(model.parameters())
    captured = capture({"m": model, "o": optimizer, "fresh": fresh}, rank=0)
    assert [key for key, _ in get(captured.tree, ("o", "state")).items] == ["weight", "bias"]
    assert get(captured.tree, ("fresh", "state")).items == ()
    assert len(fresh.state) == 0
    assert model.unused not in optimizer.state


def test_groups_keep_their_place_and_a_tensor_option_is_a_leaf():
    model = nn.Linear(2, 2)
    groups = [
        {"params": [model.weight], "tag": "mid"},
        {"params": []},
        {"params": [model.bias], "lr": torch.tensor(0.3)},
    ]
    captured = capture({"m": model, "o": torch.optim.SGD(groups, lr=0.1)}, rank=0)
    node = get(captured.tree, ("o", "param_groups"))
    assert len(node.items) == 3
    assert dict(node.items[0].items)["tag"] == ValueNode("mid")
    assert dict(node.items[1].items)["params"] == DictNode((), union=True)
    assert ("o", "param_groups", 2, "lr") in paths(captured)


def test_names_that_the_user_gave_to_parameters_are_left_out():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    node = get(capture({"m": model, "o": optimizer}, rank=0).tree, ("o", "param_groups", 0))
    assert "param_names" not in dict(node.items)


def test_a_parameter_in_no_module_is_refused():
    line = refusal({"o": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)})
    assert "'o'" in line
    assert "put the model in the state too" in line


def test_state_beside_parameters():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["rounds"] = 3
    captured = capture({"m": model, "o": optimizer}, rank=0)
    assert get(captured.tree, ("o", "state", "rounds")) == ValueNode(3)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_an_optimizer_that_hides_state_of_other_ranks_is_refused(fake_world):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415

    fake_world(0, 1)
    model = nn.Linear(2, 2)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    assert "ZeroRedundancyOptimizer" in refusal({"m": model, "zero": zero})


# objects with state_dict


def test_schedulers_and_scalers():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {
        "lambda": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.9**k),
        "steps": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
    }
    captured = capture(state, rank=0)
    assert get(captured.tree, ("lambda", "lr_lambdas", 0)) == ValueNode(None)
    assert get(captured.tree, ("steps", "milestones")).kind is DictKind.COUNTER
    assert get(captured.tree, ("scaler", "scale")) == ValueNode(8.0)


def test_functions_that_a_scheduler_holds_are_left_out_and_others_are_refused():
    class Mine(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer):
            self.shape = lambda k: k
            self.table = {"f": [len]}
            super().__init__(optimizer)

        def get_lr(self):
            return [0.1]

    class Other:
        def state_dict(self):
            return {"f": len}

        def load_state_dict(self, state):
            pass

    scheduler = Mine(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    tree = capture({"s": scheduler}, rank=0).tree
    assert get(tree, ("s", "shape")) == ValueNode(None)
    assert get(tree, ("s", "table", "f", 0)) == ValueNode(None)
    assert callable(scheduler.shape)
    assert "'o.f'" in refusal({"o": Other()})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(nn.Linear, False), (nn.Linear(1, 1), True), ({}, False), (torch.amp.GradScaler("cpu"), True), ("x", False)],
)
def test_what_is_stateful(value, expected):
    assert is_stateful(value) is expected


# per rank, explicit offsets, subclasses, DTensors


def test_a_value_per_rank_has_its_rank_in_the_path():
    captured = capture({"rng": PerRank({"torch": torch.zeros(2), "n": 5})}, rank=3)
    assert captured.tree.items[0][1] == PerRankNode(((3, DictNode((("torch", TensorNode()), ("n", ValueNode(5))))),))
    (leaf,) = captured.leaves
    assert (leaf.path, leaf.holding) == (("rng", 3, "torch"), Holding.PER_RANK)


def test_a_value_per_rank_may_be_an_object():
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    assert get(capture({"s": PerRank(scheduler)}, rank=1).tree, ("s", 1, "last_epoch")) == ValueNode(0)


def test_per_rank_inside_of_per_rank_is_refused():
    assert "'a.0.b'" in refusal({"a": PerRank({"b": PerRank(1)})})


def test_explicit_offsets():
    view = ShardedView((8, 3), torch.float32, [((1, 0), torch.zeros(4, 3))])
    (leaf,) = capture({"w": view}, rank=0).leaves
    assert (leaf.global_shape, leaf.holding) == ((8, 3), Holding.SHARDED)


def test_a_subclass_of_several_tensors_is_a_dict_of_them():
    two = TwoTensor(torch.zeros(2), torch.ones(2))
    captured = capture({"w": nn.Parameter(two)}, rank=0)
    assert paths(captured) == [("w", "a"), ("w", "b")]
    assert get(captured.tree, ("w", SUBCLASS_KEY)).value.endswith("TwoTensor")


def test_dtensors_are_sharded_unless_all_axes_replicate(fake_world):
    fake_world(1, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        "hsdp": DTensor.from_local(torch.zeros(2, 3), mesh, [Replicate(), Shard(0)], run_check=False),
        "copy": DTensor.from_local(torch.zeros(2, 3), mesh, [Replicate(), Replicate()], run_check=False),
        "plain": torch.zeros(1),
    }
    leaves = {leaf.path[0]: leaf for leaf in capture(state, rank=1).leaves}
    assert leaves["hsdp"].holding is Holding.SHARDED
    assert leaves["hsdp"].global_shape == (4, 3)
    assert leaves["hsdp"].pieces[0].box.offset == (2, 0)
    assert leaves["copy"].holding is Holding.REPLICATED
    assert leaves["plain"].holding is Holding.REPLICATED


def test_a_dtensor_per_rank_is_refused(fake_world):
    fake_world(0, 2)
    tensor = DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert "take it out of PerRank" in refusal({"x": PerRank(tensor)})


def test_memory_is_left_where_it_is():
    x = torch.arange(4.0)
    (leaf,) = capture({"x": x}, rank=0).leaves
    x += 1
    assert leaf.pieces[0].view.tolist() == [1.0, 2.0, 3.0, 4.0]
