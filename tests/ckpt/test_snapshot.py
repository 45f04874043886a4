from __future__ import annotations

import io
import uuid
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import vescale_ckpt as vc
from vescale_ckpt.errors import (
    CorruptionError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    ObjectNotFoundError,
)
from vescale_storage import loop
from vescale_storage.keys import pack_key


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(5)
    return {"large": torch.from_numpy(rng.random((900, 700), dtype=np.float32)), "small": torch.arange(6).reshape(2, 3)}


@pytest.fixture(scope="module")
def store(tensors):
    store = vc.open_store(f"memory://{uuid.uuid4().hex}")
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    state = {
        "model": model,
        "tied": tensors["large"],
        "t": tensors,
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "array": np.arange(4, dtype=np.int16),
        "blob": bytes(5000),
        "file": io.BytesIO(b"x" * 10),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
        "values": [1, 2.5, None, ("a", b"b"), OrderedDict(k=torch.float16)],
        "rng": vc.PerRank({"seed": 4}),
    }
    with vc.Checkpointer(store, "r") as checkpointer:
        checkpointer.save(3, state, metadata={"loss": 0.5})
    return store


def test_what_a_snapshot_is_called_and_says_of_itself(store):
    snapshot = store["r"]
    assert (snapshot.name, snapshot.run, snapshot.step, snapshot.metadata) == ("r@3", "r", 3, {"loss": 0.5})
    assert repr(snapshot) == f"Snapshot('r@3' version 1 in {store.url})"


def test_tensors_are_listed_without_reading_any(store):
    before = store.counts.down_bytes
    snapshot = store["r"]
    snapshot.manifest  # noqa: B018 - read once, then kept
    listed = store.counts.down_bytes
    found = snapshot.tensors()
    assert store.counts.down_bytes == listed > before
    large = found["tied"]
    assert (large.dtype, large.shape, large.kind, large.num_bytes) == (torch.float32, (900, 700), "tensor", 2_520_000)
    assert large.num_chunks > 1
    assert (found["t.large"].alias_of, found["t.large"].num_chunks) == ("tied", 0)
    assert {name: info.kind for name, info in found.items() if info.kind != "tensor"} == {
        "array": "numpy",
        "blob": "bytes",
        "file": "bytes_io",
    }
    assert (found["none"].num_chunks, found["scalar"].shape, found["scalar"].num_bytes) == (0, (), 2)


def test_two_tensors_of_one_dotted_name_are_both_listed_and_read_by_path(store):
    snapshot = store["r"]
    found = [info for info in snapshot.tensors().values() if info.name == "a.b"]
    assert {info.path for info in found} == {("a.b",), ("a", "b")}
    assert snapshot.read(("a.b",)).item() == 1
    assert snapshot.read(("a", "b")).item() == 0
    with pytest.raises(InvalidInputError, match="pass the path, as a tuple"):
        snapshot.read("a.b")


@pytest.mark.parametrize(
    "box",
    [
        None,
        slice(3, 5),
        slice(-2, None),
        (slice(1, 2), slice(0, 700)),
        (slice(890, 5000), slice(5, 6)),
        (slice(5, 5),),
        vc.Box((100, 200), (300, 1)),
    ],
    ids=str,
)
def test_any_box_is_read(store, tensors, box):
    got = store["r"].read("t.large", box)
    index = box.slices if isinstance(box, vc.Box) else (slice(None) if box is None else box)
    assert torch.equal(got, tensors["large"][index])


def test_only_the_chunks_of_a_box_are_read(store):
    snapshot = store["r"]
    snapshot.tensors()
    before = store.counts.down_bytes
    snapshot.read("t.large", (slice(0, 1), slice(0, 1)))
    assert store.counts.down_bytes - before <= 256 * 1024


@pytest.mark.parametrize("name", ["scalar", "small", "array", "none", "file"])
def test_tensors_of_every_kind_are_read(store, name):
    got = store["r"].read(f"t.{name}" if name == "small" else name)
    expected = {
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "small": torch.arange(6).reshape(2, 3),
        "array": torch.arange(4, dtype=torch.int16),
        "none": torch.empty(0, 3),
        "file": torch.full((10,), ord("x"), dtype=torch.uint8),
    }[name]
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("path", "box", "error"),
    [
        ("nothing", None, NotFoundError),
        ("large", None, NotFoundError),
        ("t.small", (slice(0, 2, 2),), InvalidInputError),
        ("t.small", (slice(0, 1),) * 3, InvalidInputError),
        ("t.small", vc.Box((0, 0), (2, 4)), InvalidInputError),
        ("t.small", vc.Box((0,), (2,)), InvalidInputError),
    ],
)
def test_what_cannot_be_read_is_told(store, path, box, error):
    with pytest.raises(error) as caught:
        store["r"].read(path, box)
    assert repr(path) in str(caught.value) or f"'{path}'" in str(caught.value)


def test_a_name_that_is_nearly_right_gets_a_hint(store):
    with pytest.raises(NotFoundError, match=r"among them 't\.large'"):
        store["r"].read("large")


def test_the_whole_state_comes_back_in_one_process(store, tensors):
    state = store["r"].state_dict()
    assert torch.equal(state["t"]["large"], tensors["large"])
    assert state["tied"] is state["t"]["large"] or state["tied"].data_ptr() == state["t"]["large"].data_ptr()
    assert state["values"] == [1, 2.5, None, ("a", b"b"), OrderedDict(k=torch.float16)]
    assert type(state["values"][4]) is OrderedDict
    assert state["rng"] == {0: {"seed": 4}}
    assert isinstance(state["array"], np.ndarray)
    assert state["blob"] == bytes(5000)
    assert state["file"].getvalue() == b"x" * 10
    assert list(state["model"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(state["model"]["1.weight"], state["model"]["0.weight"].t())


def test_a_state_that_cannot_be_made_is_refused_with_the_reason():
    class Pair(torch.Tensor):
        @staticmethod
        def __new__(cls, a):
            return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

        def __init__(self, a):
            self.a = a

        def __tensor_flatten__(self):
            return ["a"], None

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(func)

    store = vc.open_store(f"memory://{uuid.uuid4().hex}")
    with vc.Checkpointer(store, "r") as checkpointer:
        checkpointer.save(0, {"p": Pair(torch.ones(3))})
    with pytest.raises(MismatchError, match="cannot make a state of r@0"):
        store["r@0"].state_dict()


def test_verifying_finds_nothing_wrong_or_says_what():
    store = vc.open_store(f"memory://{uuid.uuid4().hex}")
    with vc.Checkpointer(store, "r") as checkpointer:
        checkpointer.save(0, {"w": torch.rand(1000)})
    assert store["r"].verify().ok
    key = pack_key(store["r"].manifest.packs[0].name)
    data = bytearray(loop.run(store.backend.get(key)))
    data[17] ^= 1
    loop.run(store.backend.put(key, [bytes(data)]))
    report = store["r"].verify()
    assert len(report.problems) == 1
    assert "cannot load 'w'" in report.problems[0]
    with pytest.raises(CorruptionError, match="cannot load 'w'"):
        store["r"].read("w")


def test_the_whole_state_may_lie_in_a_file(store, tensors, tmp_path):
    snapshot = store["r"]
    state, expected = snapshot.full_state_dict(tmp_path / "made"), snapshot.state_dict()
    assert state.keys() == expected.keys()
    assert torch.equal(state["t"]["large"], tensors["large"])
    assert state["tied"].data_ptr() == state["t"]["large"].data_ptr(), "ties are one memory"
    assert torch.equal(state["model"]["1.weight"], expected["model"]["1.weight"])
    assert np.array_equal(state["array"], expected["array"])
    assert (state["blob"], state["file"].getvalue()) == (expected["blob"], expected["file"].getvalue())
    assert (state["none"].shape, state["values"], state["rng"]) == ((0, 3), expected["values"], {0: {"seed": 4}})
    (file,) = (tmp_path / "made").iterdir()
    raw = file.read_bytes()
    assert tensors["large"].numpy().tobytes() in raw, "it is in the file"
    assert len(raw) < 1.01 * tensors["large"].nbytes + 10_000
    file.unlink()
    assert torch.equal(state["t"]["large"], tensors["large"]), "and may go from there"


def test_a_file_of_what_could_not_be_read_is_not_left_behind(tmp_path):
    store = vc.open_store(f"memory://{uuid.uuid4().hex}")
    with vc.Checkpointer(store, "r") as checkpointer:
        checkpointer.save(0, {"w": torch.arange(500_000)})
    key = pack_key(store["r"].manifest.packs[0].name)
    loop.run(store.backend.delete(key))
    with pytest.raises(ObjectNotFoundError):
        store["r"].full_state_dict(tmp_path)
    assert list(tmp_path.iterdir()) == []
