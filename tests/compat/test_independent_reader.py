"""Stores that the library makes, read by a reader that was made from FORMAT.md alone, which refuses damage."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from torch import nn

import vescale_ckpt as vc
from tests.compat import independent_reader as reader
from tests.compat.independent_reader import DamagedError, Library, PerRank, Store, Tensor
from tests.distributed.threads import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DOCUMENT = (Path(__file__).parents[2] / "storage" / "FORMAT.md").read_text(encoding="utf-8")
FROZEN = Path(__file__).parent / "data" / "v1"
RUN = "run"
SIGNALLING_NAN = struct.unpack("<d", bytes.fromhex("010000000000f47f"))[0]


def save(path: Path, *states: Any, run: str = RUN, codec: str = "raw") -> Path:
    """Save states as the steps 0, 1, ... of a run."""
    store = vc.open_store(path)
    with vc.Checkpointer(store, run, options=vc.SaveOptions(codec=codec)) as checkpointer:
        for step, state in enumerate(states):
            checkpointer.save(step, state).result()
    return path


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(value: Any, found: Any, snapshot: reader.Snapshot) -> None:
    """Require that the reader found a value as it was: its type, its bits, and the order of its keys."""
    if isinstance(value, vc.PerRank):
        value, found = [value.value], list(found.values.values())
    if isinstance(value, torch.Tensor | np.ndarray):
        tensor, kind = (value, "tensor") if isinstance(value, torch.Tensor) else (torch.from_numpy(value), "numpy")
        read = snapshot.read_torch(found.path)
        assert (read.dtype, read.shape, snapshot.kind(found.path)) == (tensor.dtype, tensor.shape, kind)
        assert bits(read) == bits(tensor)
        return
    assert type(found) is type(value)
    if isinstance(value, dict):
        assert list(found) == list(value)
        value, found = list(value.values()), list(found.values())
    if isinstance(value, list | tuple):
        for one, other in zip(value, found, strict=True):
            assert_same(one, other, snapshot)
    elif isinstance(value, float | complex):
        assert struct.pack("<dd", found.real, found.imag) == struct.pack("<dd", value.real, value.imag)
    else:
        assert found == value


def assert_holds(snapshot: reader.Snapshot, state: Any) -> None:
    """Require that a snapshot is a state of plain values and tensors."""
    assert_same(state, snapshot.tree, snapshot)


def read_all(path: Path) -> list[Any]:
    """Return everything that the snapshots of a store are."""
    store = Store(path)
    names = [f"{run}@{name}" for run in store.runs() for name in [*store.snapshots(run), *store.tags(run)]]
    snapshots = [(name, store.open(name)) for name in names]
    return [(name, repr(s.tree), [(path, s.read(path).tobytes()) for path in s.tensors()]) for name, s in snapshots]


# What is read is what was saved


VALUES = {
    "none": [None, True, False],
    "ints": (0, -5, 2**53 - 1, 2**53, -(2**53), -(2**53) + 1, 2**200, -(2**63)),
    "floats": [0.1, -0.0, math.nan, -math.nan, SIGNALLING_NAN, math.inf, -math.inf, 5e-324],
    "complex": [complex(-0.0, math.nan), 1 - 2j],
    "strings": ["", 'é\n\0\x1f\x7f"\\\u2028\U0001f600', "a\ud800", "\ud83d\ude00", "valid", '["tensor"]'],
    "bytes": [b"", bytes(range(256))],
    "nested": [(), [], {}, ((),), [[{"a": ({},)}]]],
    7: {0: "int", "0": "str", -(2**63): "least", 2**63 - 1: "most", "": "empty", "a.b": {"c": 1}, "a": {"b.c": 2}},
    "per rank": vc.PerRank([1, {"seed": 2}]),
    "kinds of dicts": [OrderedDict(z=1, a=2), Counter("aab"), OrderedDict(), Counter()],
}


def test_values(tmp_path):
    assert_holds(Store(save(tmp_path, VALUES)).open("run@0"), VALUES)


@pytest.mark.parametrize("state", [None, 5, [], torch.arange(3), [torch.ones(2), (1,)]], ids=repr)
def test_states_that_are_no_dict(tmp_path, state):
    assert_holds(Store(save(tmp_path, state)).open("run"), state)


def test_values_of_libraries(tmp_path):
    values = [torch.bfloat16, torch.strided, torch.channels_last, torch.device("cuda:1"), torch.Size([3, 0])]
    values += [np.float32(1.5), np.bool_(True), np.int16(-2), np.complex64(1 - 2j), np.str_("é"), np.bytes_(b"q\0r")]
    written = ["torch.dtype bfloat16", "torch.layout strided", "torch.memory_format channels_last"]
    written += ["torch.device cuda:1", "torch.Size 3,0", "numpy.float32 0000c03f", "numpy.bool 01", "numpy.int16 feff"]
    written += ["numpy.complex64 0000803f000000c0", "numpy.str_ é", "numpy.bytes_ 710072"]
    tree = Store(save(tmp_path, values)).open("run@0").tree
    assert tree == [Library(*text.split(" ")) for text in written]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of a dtype, filled from its bytes."""
    count = math.prod(shape) * dtype.itemsize
    data = torch.arange(count, dtype=torch.int64).mul(37).add(5).remainder(2 if dtype == torch.bool else 251)
    return data.to(torch.uint8).view(dtype).reshape(shape)


def test_every_dtype_and_shape(tmp_path):
    dtypes = [getattr(torch, name) for name in reader.ITEM_SIZES]
    state: dict[str, Any] = {str(dtype): some(dtype, 3, 2, 4) for dtype in dtypes}
    state |= {f"{dtype}, no dims": some(dtype) for dtype in dtypes}
    state |= {"empty": torch.zeros(3, 0, 2), "nothing": torch.zeros(0), "many dims": some(torch.int16, *[1] * 20, 3, 2)}
    state |= {"strided": some(torch.float32, 6, 4).t()[::2], "array": np.arange(6.0).reshape(2, 3)}
    state |= {"0-d array": np.array(True), "empty array": np.zeros((0, 2), np.int8)}
    for codec in "raw", "zstd":
        assert_holds(Store(save(tmp_path / codec, state, codec=codec)).open("run@0"), state)


def test_long_bytes_lie_beside_the_tensors(tmp_path):
    state = {"bytes": bytes(range(256)) * 300, "stream": io.BytesIO(b"stream" * 500)}
    snapshot = Store(save(tmp_path, state)).open("run@0")
    assert snapshot.tree == {"bytes": Tensor(("bytes",)), "stream": Tensor(("stream",))}
    assert snapshot.read(("bytes",)).tobytes() == state["bytes"]
    assert snapshot.read(("stream",)).tobytes() == state["stream"].getvalue()
    assert (snapshot.kind(("bytes",)), snapshot.kind(("stream",))) == ("bytes", "bytes_io")


class Tied(nn.Module):
    """A model with two names for one weight, a buffer and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.norm(self.embed(tokens))))


def trained() -> tuple[Tied, torch.optim.Optimizer]:
    """Return a model and its optimizer after one step."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.arange(10)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_model_with_ties_and_its_optimizer(tmp_path, codec):
    model, optimizer = trained()
    snapshot = Store(save(tmp_path, {"model": model, "optimizer": optimizer}, codec=codec)).open("run@0")
    for name, tensor in model.state_dict().items():
        assert snapshot.read(("model", name)).tobytes() == bits(tensor)
    assert snapshot.tree["model"].keys() == model.state_dict().keys()
    groups, state = snapshot.tree["optimizer"]["param_groups"], snapshot.tree["optimizer"]["state"]
    assert groups[0]["lr"] == 0.25
    assert set(groups[0]["params"]) == set(state) | {"frozen.weight", "frozen.bias"}
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            assert snapshot.read(("optimizer", "state", name, key)).tobytes() == bits(tensor)
    owners = {snapshot.owners[snapshot.index["model", name]] for name in ("embed.weight", "head.weight")}
    assert len(owners) == 1


def cut(tensor: torch.Tensor, *rows: int) -> vc.ShardedView:
    """Return a tensor in pieces of so many rows."""
    starts = [sum(rows[:i]) for i in range(len(rows))]
    pieces = [
        ((start, *[0] * (tensor.ndim - 1)), tensor[start : start + n]) for start, n in zip(starts, rows, strict=True)
    ]
    return vc.ShardedView(tuple(tensor.shape), tensor.dtype, pieces)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_many_tiles_and_parts_of_tiles(tmp_path, codec):
    whole = {"tiles": torch.arange(300_000), "rows": some(torch.float32, 700, 300), "few": some(torch.complex64, 4, 3)}
    grid = some(torch.bfloat16, 5, 6)
    boxes = [(slice(0, 2), slice(0, 6)), (slice(2, 5), slice(0, 1)), (slice(2, 5), slice(1, 6))]
    pieces = [((a.start, b.start), grid[a, b]) for a, b in boxes]
    state = {"tiles": whole["tiles"], "rows": cut(whole["rows"], 7, 0, 400, 293), "few": cut(whole["few"], 1, 2, 1)}
    state["grid"] = vc.ShardedView((5, 6), torch.bfloat16, pieces)
    snapshot = Store(save(tmp_path, state, codec=codec)).open("run@0")
    assert_holds(snapshot, whole | {"grid": grid})
    first = snapshot.tables["CHUNK_FIRST"]
    assert first[1] - first[0] > 1
    assert len(snapshot.tables["PARTIAL_ROW"]) >= 6
    assert set(snapshot.tables["CHUNK_CODEC"]) == ({0, 1} if codec == "zstd" else {0})


def test_ranks_of_one_save(tmp_path):
    weight, store = some(torch.float32, 9, 5), vc.open_store(tmp_path)

    def body(group: Any) -> None:
        checkpointer, rank = vc.Checkpointer(store, RUN), group.rank
        checkpointer._group_made = group
        own = vc.ShardedView((9, 5), torch.float32, [((rank * 3, 0), weight[rank * 3 : rank * 3 + 3])])
        state = {"own": own, "copy": weight, "rng": vc.PerRank({"seed": rank, "state": torch.full((2,), rank)})}
        checkpointer.save(4, state).result()

    assert run_ranks(3, body) == [None] * 3
    snapshot = Store(tmp_path).open("run")
    assert snapshot.head["world_size"] == 3
    assert snapshot.tree["rng"].values[2] == {"seed": 2, "state": Tensor(("rng", 2, "state"))}
    assert [snapshot.read_torch(("rng", rank, "state")).tolist() for rank in range(3)] == [[0, 0], [1, 1], [2, 2]]
    assert bits(snapshot.read_torch(("own",))) == bits(snapshot.read_torch(("copy",))) == bits(weight)


# Runs, steps, tags


def test_snapshots_share_what_is_equal(tmp_path):
    frozen = some(torch.float64, 100)
    states = [{"frozen": frozen, "step": torch.tensor(step), "note": step} for step in range(3)]
    store = Store(save(tmp_path, *states))
    assert list(store.snapshots(RUN)) == [0, 1, 2]
    snapshots = [store.open(f"run@{step}") for step in range(3)]
    for snapshot, state in zip(snapshots, states, strict=True):
        assert_holds(snapshot, state)
    assert snapshots[0].tables["PACK_NAME"][0] in snapshots[2].tables["PACK_NAME"]
    assert_holds(store.open("run"), states[2])


def test_what_deletion_and_collection_leave_is_whole(tmp_path):
    states = [{"kept": some(torch.int32, 50), "lost": torch.full((1000,), step)} for step in range(3)]
    store = vc.open_store(save(tmp_path, *states))
    store.delete(RUN, 0)
    store.gc(0, repack=True, now=2**33)
    assert list(Store(tmp_path).snapshots(RUN)) == [1, 2]
    for step in 1, 2:
        assert_holds(Store(tmp_path).open(f"run@{step}"), states[step])


def test_runs_tags_and_versions(tmp_path):
    names = ["my run, é%", "run", "~", "..."]
    for name in names:
        save(tmp_path, {"run": name}, run=name)
    save(tmp_path, {"run": "again"})
    made = vc.open_store(tmp_path)
    made.tag("my run, é%", 0, "best [ü]")
    (tmp_path / "refs" / "run" / "000000000009.000001.tmp").touch()
    (tmp_path / "refs" / "not%2drun").mkdir()
    store = Store(tmp_path)
    assert sorted(store.runs()) == sorted(names)
    assert [store.open(name).tree["run"] for name in names] == ["my run, é%", "again", "~", "..."]
    assert store.snapshots("run") == {0: 2}
    assert store.open("run@0").tree == {"run": "again"}
    assert store.tags("my run, é%") == ["best [ü]"]
    tag, ref = store.tag("my run, é%", "best [ü]"), store.ref("my run, é%", 0)
    assert {name: tag[name] for name in ref if name not in {"check", "kind"}} == {
        name: value for name, value in ref.items() if name not in {"check", "kind"}
    }
    assert store.open("my run, é%@best [ü]").head["metadata"] == {}
    for missing in "run@1", "run@best", "nobody", "nobody@0", "../run", "a/b@0":
        with pytest.raises(DamagedError):
            store.open(missing)


# Damage


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    state = {"a": some(torch.float32, 5, 2), "zeros": torch.zeros(300), "b": [1.5, ("x", None)]}
    path = save(tmp_path_factory.mktemp("small") / "store", state, state | {"c": torch.ones(3)}, codec="zstd")
    vc.open_store(path).tag(RUN, 1, "best")
    read_all(path)
    return path


def objects(path: Path) -> list[Path]:
    """Return the objects that a reader needs: all but those of the index, which may be missing."""
    return sorted(file for file in path.rglob("*") if file.is_file() and file.relative_to(path).parts[0] != "index")


def damages(data: bytes) -> Iterator[bytes]:
    """Yield bytes with one bit turned, at places all over, and bytes cut and grown."""
    for place in {*range(0, len(data), max(1, len(data) // 40)), *range(min(24, len(data))), len(data) - 1}:
        yield data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
    yield from (b"", data[:-1], data[1:], data[: len(data) // 2], data + b"\0", data + b" ", bytes(len(data)))


def test_no_damage_goes_unnoticed(small):
    everything, unharmed = read_all(small), 0
    assert {file.relative_to(small).parts[0] for file in objects(small)} == {"store.json", "refs", "manifests", "packs"}
    for file in objects(small):
        whole = file.read_bytes()
        for data in damages(whole):
            file.write_bytes(data)
            try:
                assert read_all(small) == everything
                unharmed += 1
                assert "packs" in file.parts  # what is stored changed, but not what it decodes to
            except DamagedError:
                pass
        file.write_bytes(whole)
    assert unharmed < 5
    assert read_all(small) == everything


def test_objects_in_the_place_of_others_are_refused(small, tmp_path):
    refs = small / "refs" / RUN
    kinds = [[file for file in objects(small) if kind in file.parts] for kind in ("manifests", "packs")]
    pairs = [(kind[0], kind[1]) for kind in kinds]
    pairs += [(refs / "000000000000.000001", refs / "000000000001.000001")]
    pairs += [(refs / "000000000001.000001", refs / "tags" / "best"), (refs / "tags" / "best", small / "store.json")]
    for number, (one, other) in enumerate(pairs):
        copy = tmp_path / str(number)
        shutil.copytree(small, copy)
        (copy / other.relative_to(small)).write_bytes(one.read_bytes())
        with pytest.raises(DamagedError):
            read_all(copy)
    for missing in objects(small):
        if "refs" not in missing.parts:
            copy = tmp_path / missing.name[:8]
            shutil.copytree(small, copy)
            (copy / missing.relative_to(small)).unlink()
            with pytest.raises(DamagedError, match=r"there is no|missing"):
                read_all(copy)


# Versions


def seal(record: dict[str, Any]) -> bytes:
    """Return a sealed record."""
    rest = b'",' + json.dumps({name: value for name, value in record.items() if name != "check"}).encode()[1:]
    return b'{"check":"' + blake3(rest).hexdigest().encode() + rest


def with_record(path: Path, key: str, **changes: Any) -> None:
    """Change fields of a record and seal it again."""
    file = path / key
    file.write_bytes(seal(json.loads(file.read_bytes()) | changes))


def with_manifest(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Put a changed manifest under its own name, and let the newest ref point to it."""
    record = Store(path).ref(RUN, 1)
    old = path / "manifests" / record["manifest"][:2] / record["manifest"]
    data = change(old.read_bytes())
    name = blake3(data).hexdigest()
    new = path / "manifests" / name[:2] / name
    new.parent.mkdir(exist_ok=True)
    new.write_bytes(data)
    with_record(path, "refs/run/000000000001.000001", manifest=name)


def with_section(kind: int, flags: int) -> Callable[[bytes], bytes]:
    """Return a change that gives a document one more section at its end."""

    def change(data: bytes) -> bytes:
        magic, major, _, count, size = struct.unpack_from("<8sHHIQ", data)
        table = b"".join(
            struct.pack("<HHIQQ", k, f, z, offset + 24, length)
            for k, f, z, offset, length in struct.iter_unpack("<HHIQQ", data[24 : 24 + 24 * count])
        )
        table += struct.pack("<HHIQQ", kind, flags, 0, size + 24, 3)
        header = struct.pack("<8sHHIQ", magic, major, 9, count + 1, size + 32)
        return header + table + data[24 + 24 * count :] + b"new\0\0\0\0\0"

    return change


def test_additions_of_minor_versions_are_ignored(small, tmp_path):
    shutil.copytree(small, tmp_path / "s")
    with_record(tmp_path / "s", "store.json", minor=7, colour="red")
    with_manifest(tmp_path / "s", with_section(900, 0))
    with_record(tmp_path / "s", "refs/run/000000000001.000001", colour={"nested": [1]})
    read_all(tmp_path / "s")


def patch(offset: int, data: bytes) -> Callable[[bytes], bytes]:
    """Return a change of some bytes."""
    return lambda whole: whole[:offset] + data + whole[offset + len(data) :]


def test_a_manifest_of_another_snapshot_is_refused(small, tmp_path):
    shutil.copytree(small, tmp_path / "s")
    other = Store(small).ref(RUN, 0)["manifest"]
    with_record(tmp_path / "s", "refs/run/000000000001.000001", manifest=other)
    with pytest.raises(DamagedError, match="of another snapshot"):
        Store(tmp_path / "s").open("run@1")


@pytest.mark.parametrize(
    "change",
    [
        lambda path: with_record(path, "store.json", major=2),
        lambda path: with_record(path, "store.json", format=2),
        lambda path: with_record(path, "refs/run/000000000001.000001", format=2),
        lambda path: with_record(path, "refs/run/tags/best", format=2),
        lambda path: with_manifest(path, patch(8, b"\2")),
        lambda path: with_manifest(path, with_section(900, 1)),
    ],
    ids=["store", "root", "ref", "tag", "manifest", "section"],
)
def test_newer_versions_are_refused_by_name(small, tmp_path, change):
    shutil.copytree(small, tmp_path / "s")
    change(tmp_path / "s")
    with pytest.raises(DamagedError, match=r"known is 1|newer version"):
        read_all(tmp_path / "s")


# What the document and the frozen files hold


def example(name: str) -> bytes:
    """Return the bytes of one of the document's examples."""
    text = DOCUMENT.split(f"<!-- example: {name} -->\n```\n")[1].split("\n```")[0]
    dump = re.findall(r"^[0-9a-f]{8}  ((?:[0-9a-f]{2} ?){1,16})", text, re.MULTILINE)
    return bytes.fromhex("".join(dump)) if dump else text.encode()


def test_examples_of_the_document(tmp_path):
    data = example("pack")
    name = blake3(data[0x24:]).digest()
    (tmp_path / "pack").write_bytes(data)
    pack = reader.Pack(tmp_path / "pack", name, len(data))
    first, second = pack.entries.values()
    assert np.frombuffer(pack.read(*first[:2]), np.int32).tolist() == [0, 1, 2, 3]
    assert reader.decode_zstd(pack.read(*second[:2]), 256) == bytes(256)
    assert name.hex() in DOCUMENT
    for kind in "store", "ref", "tag":
        assert reader.unseal(example(kind), kind)["kind"] == kind
    assert reader.Snapshot(None, example("manifest")).tree == {}


def test_a_frozen_manifest():
    snapshot = reader.Snapshot(None, (FROZEN / "manifest-full.bin").read_bytes())
    assert (snapshot.head["run"], snapshot.head["step"]) == ("llama 7b [é]", 999_999_999_999)
    assert snapshot.tree["state"]["rng"] == PerRank({0: {"torch": Tensor(("state", "rng", 0, "torch"))}, 2: 7})
    assert snapshot.tree["state"]["counter"] == Counter({30: 1})
    assert snapshot.tree["values"]["of a library to come"] == Library("jax.dtype", "float1")
    assert snapshot.tensors()["state", "a.b"] == ("bfloat16", (10, 6))
    assert snapshot.boxes[1] == (slice(0, 2), slice(3, 6))
