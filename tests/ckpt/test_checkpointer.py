from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
import uuid

import numpy as np
import pytest
import torch
from torch import nn

import vescale_ckpt as vc
from tests.distributed.threads import all_well, run_ranks
from vescale_ckpt.errors import (
    AccessDeniedError,
    ConfigError,
    InvalidInputError,
    MismatchError,
    NoSpaceError,
    NotFoundError,
    RankFailureError,
    SnapshotNotFoundError,
    StorageError,
    StoreNotFoundError,
    VeScaleError,
)
from vescale_ckpt.store import Store
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.wrappers.faults import FaultBackend

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def store():
    return vc.open_store(f"memory://{uuid.uuid4().hex}")


def trained(seed, steps=2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / seed)
    for _ in range(steps):
        model(torch.randn(5, 8)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "model": model,
        "optimizer": optimizer,
        "extra": {"step": steps, "seed": seed, "history": [0.1 * seed]},
        "array": np.full(3, seed),
        "rng": vc.PerRank(torch.get_rng_state()),
    }


def same(a, b):
    for one, other in zip(a["model"].state_dict().values(), b["model"].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    states = [s["optimizer"].state_dict() for s in (a, b)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for key, mine in states[0]["state"].items():
        assert all(torch.equal(value, states[1]["state"][key][name]) for name, value in mine.items())
    assert a["extra"] == b["extra"]
    assert (a["array"] == b["array"]).all()
    assert torch.equal(a["rng"].value, b["rng"].value)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_training_state_is_filled_in_place_to_the_bit(store, steps):
    saved, other = trained(1), trained(2, steps)
    parameter = other["model"][0].weight
    with vc.Checkpointer(store, "r") as checkpointer:
        report = checkpointer.save(2, saved).result()
        assert (report.step, report.version, report.imbalance) == (2, 1, 1.0)
        found = checkpointer.load(other)
    assert found.step == 2
    same(saved, other)
    assert other["model"][0].weight is parameter
    assert 0 < found.bytes_read <= found.bytes_needed


def test_the_familiar_two_lines(tmp_path):
    saved, other = trained(1), trained(2)
    assert vc.save(tmp_path / "ckpt", saved).version == 1
    vc.load(tmp_path / "ckpt", other)
    same(saved, other)
    assert vc.save(str(tmp_path / "ckpt"), other).version == 2


def test_a_load_waits_for_the_background(store):
    faults = FaultBackend(MemoryBackend(uuid.uuid4().hex))
    faults.delay("put_if_absent", 0.3, prefix="packs/")
    with vc.Checkpointer(Store(faults, exists=False), "r") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}, blocking=False)
        target = {"w": torch.zeros(3)}
        assert checkpointer.load(target).step == 1
        assert target["w"].tolist() == [1, 1, 1]


def test_an_unseen_failure_is_raised_by_wait_once():
    faults = FaultBackend(MemoryBackend(uuid.uuid4().hex))
    with vc.Checkpointer(Store(faults, exists=False), "r") as checkpointer:
        checkpointer.wait()
        faults.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/")
        checkpointer.save(1, {"w": torch.ones(3)}, blocking=False)
        with pytest.raises(NoSpaceError, match="disk full"):
            checkpointer.wait()
        checkpointer.wait()
        assert checkpointer.save(1, {"w": torch.ones(3)}).result().version == 1


def test_a_failure_that_one_rank_alone_knows_keeps_no_rank_from_loading_together():
    """A rank may learn less than the others, as when it could not read the outcome; all must then raise."""
    backend = MemoryBackend(uuid.uuid4().hex)

    def body(group):
        faults = FaultBackend(backend)
        checkpointer = vc.Checkpointer(Store(faults, exists=False), "r")
        checkpointer._group_made = group
        checkpointer.save(0, {"w": torch.ones(3)})
        handle = checkpointer.save(1, {"w": torch.ones(3)}, blocking=False)
        handle.wait_done()
        if group.rank == 1:
            handle._report, handle._error = None, NoSpaceError("could not tell")
            handle._state = vc.SaveState.FAILED
        began = time.monotonic()
        try:
            checkpointer.load({"w": torch.zeros(3)})
        except VeScaleError as error:
            assert time.monotonic() - began < 10
            return [error, checkpointer.load({"w": torch.zeros(3)}).step]
        return [None, None]

    outcomes = all_well(run_ranks(3, body))
    assert isinstance(outcomes[1][0], NoSpaceError)
    assert all(isinstance(outcomes[rank][0], RankFailureError) for rank in (0, 2))
    assert [step for _, step in outcomes] == [1, 1, 1]


def test_closing_ends_the_thread_and_leaving_with_an_error_hides_nothing(store):
    before = set(threading.enumerate())
    checkpointer = vc.Checkpointer(store, "r")
    checkpointer.save(1, {"w": torch.ones(3)}, blocking=False)
    checkpointer.close()
    checkpointer.close()
    assert not [t for t in set(threading.enumerate()) - before if t.name == "vescale-save"]

    def leave():
        with vc.Checkpointer(store, "r") as other:
            other.save(2, {"w": torch.ones(3)}, blocking=False)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    assert checkpointer.save(3, {"w": torch.ones(3)}).result().step == 3


# ---- bytes


def bytes_of(store):
    return store.counts.up_bytes


def test_what_does_not_change_is_stored_once(store):
    frozen, changing = torch.rand(4 * MIB // 4), torch.rand(256)
    seen = []
    with vc.Checkpointer(store, "r") as checkpointer:
        for step in range(3):
            changing += 1
            seen.append(changing.clone())
            checkpointer.save(step, {"frozen": frozen, "changing": changing})
    assert bytes_of(store) <= 4.25e6
    for step in range(3):
        state = store[f"r@{step}"].state_dict()
        assert torch.equal(state["frozen"], frozen)
        assert torch.equal(state["changing"], seen[step])


@pytest.mark.parametrize("dim", [0, 1])
def test_the_same_weights_from_another_layout_add_almost_nothing(store, dim):
    weights = {f"w{i}": torch.rand(1024, 768) for i in range(3)}

    def body(group):
        part = 1024 // 4 if dim == 0 else 768 // 4

        def view(tensor):
            start = group.rank * part
            offset = (start, 0) if dim == 0 else (0, start)
            return vc.ShardedView((1024, 768), torch.float32, [(offset, tensor.narrow(dim, start, part))])

        checkpointer = vc.Checkpointer(store, "tuned")
        checkpointer._group_made = group
        return checkpointer.save(0, {n: view(t) for n, t in weights.items()}, base="base@1").result()

    with vc.Checkpointer(store, "base") as checkpointer:
        checkpointer.save(1, weights)
    before = bytes_of(store)
    reports = all_well(run_ranks(4, body))
    assert bytes_of(store) - before <= 0.02 * before
    assert sum(r.bytes_deduplicated for r in reports) == sum(t.nbytes for t in weights.values())
    assert all(torch.equal(store["tuned@0"].read(name), tensor) for name, tensor in weights.items())


def test_several_bases_may_be_named(store):
    a, b = torch.rand(300, 300), torch.rand(300, 300)
    for run, tensor in (("one", a), ("two", b)):
        with vc.Checkpointer(store, run) as checkpointer:
            checkpointer.save(0, {"w": tensor})
    with vc.Checkpointer(store, "both") as checkpointer:
        report = checkpointer.save(0, {"a": a, "b": b}, base=("one@0", "two")).result()
    assert (report.bytes_written, report.bytes_deduplicated) == (0, 2 * a.nbytes)


# ---- bad input: one clear error each, nothing lost


STEPS = [-1, True, False, 1.0, "1", None, np.int64(1), 10**12, 10**19]


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_steps_that_are_none_are_refused_before_anything_happens(store, step):
    with vc.Checkpointer(store, "r") as checkpointer, pytest.raises(InvalidInputError, match="cannot save step"):
        checkpointer.save(step, {"w": torch.ones(2)})
    assert bytes_of(store) == 0


def test_the_largest_step_is_a_step(store):
    with vc.Checkpointer(store, "r") as checkpointer:
        assert checkpointer.save(10**12 - 1, {"w": torch.ones(2)}).result().step == 10**12 - 1
        assert checkpointer.load({"w": torch.zeros(2)}).step == 10**12 - 1


@pytest.mark.parametrize("run", ["", "a/b", ".", "..", "a@b", "x" * 300, "a\n"])
def test_names_of_runs_that_are_none_are_refused(store, run):
    with pytest.raises(ConfigError):
        vc.Checkpointer(store, run)


class Opaque:
    pass


UNSTORABLE = {
    "object": Opaque,
    "function": lambda: print,
    "lambda": lambda: lambda: 1,
    "class": lambda: Opaque,
    "set": lambda: {1, 2},
    "iterator": lambda: iter([1]),
    "lock": threading.Lock,
    "generator": lambda: (i for i in ()),
    "tuple key": lambda: {(1, 2): 3},
    "float key": lambda: {1.5: 3},
    "named tuple": lambda: os.terminal_size((1, 2)),
    "subclass of dict": lambda: type("D", (dict,), {})(a=1),
    "object array": lambda: np.array([Opaque()], dtype=object),
    "meta tensor": lambda: torch.empty(2, device="meta"),
    "sparse tensor": lambda: torch.eye(2).to_sparse(),
    "random generator": torch.Generator,
}


@pytest.mark.parametrize("make", UNSTORABLE.values(), ids=UNSTORABLE)
def test_what_cannot_be_stored_whole_is_refused_and_named(store, make):
    state = {"good": torch.ones(2), "deep": [{"bad": make()}]}
    with vc.Checkpointer(store, "r") as checkpointer:
        with pytest.raises(InvalidInputError, match=r"deep\.0\.bad"):
            checkpointer.save(1, state)
        with pytest.raises(NotFoundError):
            store["r"]
        state["deep"] = []
        assert checkpointer.save(1, state).result().version == 1


def test_a_state_that_holds_itself_is_refused(store):
    state = {"w": torch.ones(2)}
    state["again"] = [state]
    with vc.Checkpointer(store, "r") as checkpointer, pytest.raises(InvalidInputError, match="again"):
        checkpointer.save(1, state)


@pytest.mark.parametrize("metadata", [{"x": Opaque()}, {"x": float("nan")}, {1: 2}, {"x": torch.ones(1)}])
def test_metadata_that_is_no_json_is_refused_before_a_byte_is_written(store, metadata):
    with vc.Checkpointer(store, "r") as checkpointer:
        checkpointer.save(0, {"w": torch.zeros(2)})
        before = bytes_of(store)
        with pytest.raises(InvalidInputError, match="metadata"):
            checkpointer.save(1, {"w": torch.ones(2)}, metadata=metadata)
        assert bytes_of(store) == before


def test_a_target_that_does_not_fit_is_left_as_it_is(store):
    with vc.Checkpointer(store, "r") as checkpointer:
        checkpointer.save(1, {"a": torch.ones(2), "b": torch.ones(2)})
        target = {"a": torch.zeros(3), "c": torch.zeros(2)}
        with pytest.raises(MismatchError) as caught:
            checkpointer.load(target)
        assert len(caught.value.problems) == 3
        assert not any(tensor.any() for tensor in target.values())


def test_runs_steps_and_stores_that_are_not_there_are_told(store, tmp_path):
    with vc.Checkpointer(store, "r") as checkpointer:
        with pytest.raises(StoreNotFoundError):
            checkpointer.load({"w": torch.zeros(2)})
        checkpointer.save(1, {"w": torch.ones(2)})
        with pytest.raises(SnapshotNotFoundError, match="'r@2'"):
            checkpointer.load({"w": torch.zeros(2)}, step=2)
    with vc.Checkpointer(store, "other") as checkpointer, pytest.raises(SnapshotNotFoundError, match="'other'"):
        checkpointer.load({"w": torch.zeros(2)})
    with pytest.raises(StoreNotFoundError, match="nowhere"):
        vc.load(tmp_path / "nowhere", {"w": torch.zeros(2)})
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_is_no_store_is_left_as_it_is(tmp_path):
    (tmp_path / "precious").write_bytes(b"data")
    for call in (vc.save, vc.load):
        with pytest.raises(ConfigError, match="it is not a store, it holds 'precious'"):
            call(tmp_path, {"w": torch.zeros(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_file_in_the_place_of_a_store_is_told(tmp_path):
    (tmp_path / "file").write_bytes(b"data")
    with pytest.raises(ConfigError, match="no folder"):
        vc.save(tmp_path / "file", {"w": torch.zeros(2)})
    with pytest.raises(StorageError, match=r"Not a directory"):
        vc.save(tmp_path / "file" / "store", {"w": torch.zeros(2)})
    assert (tmp_path / "file").read_bytes() == b"data"


def test_s3_without_credentials_is_told_at_once(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    began = time.monotonic()
    with pytest.raises(AccessDeniedError, match=r"s3://bucket/x: Unable to locate credentials; give credentials by"):
        vc.open_store("s3://bucket/x", storage_options={"endpoint_url": "http://127.0.0.1:9"})
    assert time.monotonic() - began < 20


def mounted(path, options):
    """Mount a tmpfs where we may; return whether it is there."""
    path.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, check=False)
    return done.returncode == 0


@contextlib.contextmanager
def small_disk(path):
    """Yield a store on a disk of 3 MiB, or one that says that it is full where nothing can be mounted."""
    if mounted(path, "size=3m"):
        try:
            yield vc.open_store(path / "store")
        finally:
            subprocess.run(["umount", "-l", str(path)], check=True)
        return
    faults = FaultBackend(MemoryBackend(uuid.uuid4().hex))
    faults.fail("put_if_absent", NoSpaceError("No space left on device"), prefix="packs/", skip=1)
    yield Store(faults, exists=False)


def test_a_full_disk_fails_the_save_and_loses_nothing(tmp_path):
    first = torch.rand(MIB // 4)
    with small_disk(tmp_path / "disk") as store, vc.Checkpointer(store, "r") as checkpointer:
        checkpointer.save(1, {"w": first})
        with pytest.raises(NoSpaceError, match=r"[Nn]o space left"):
            checkpointer.save(2, {"w": torch.rand(4 * MIB // 4)})
        with pytest.raises(SnapshotNotFoundError):
            store["r@2"]
        assert torch.equal(store["r"].read("w"), first)
        assert store["r"].verify().ok
        assert checkpointer.save(3, {"w": first, "more": torch.ones(5)}).result().version == 1
        assert store["r"].step == 3


@contextlib.contextmanager
def read_only(path):
    """Yield a folder that can be read and not written, by mount where we are root and by mode where we are not."""
    vc.save(path / "store", {"w": torch.ones(3)})
    if os.geteuid():
        for folder in (path, *path.rglob("*")):
            folder.chmod(0o555 if folder.is_dir() else 0o444)
        yield path / "store"
        for folder in (path, *path.rglob("*")):
            folder.chmod(0o755)
        return
    mount = ["mount", "--bind", str(path), str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(path)], check=True)
        yield path / "store"
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_folder_that_may_only_be_read_is_read_and_a_save_is_refused(tmp_path):
    (tmp_path / "disk").mkdir()
    with read_only(tmp_path / "disk") as path:
        if path is None:
            faults = FaultBackend(MemoryBackend(uuid.uuid4().hex))
            vc.Checkpointer(Store(faults, exists=False), "checkpoint").save(0, {"w": torch.ones(3)})
            faults.fail("put_if_absent", AccessDeniedError("read-only"), times=10**6)
            store = Store(faults, exists=True)
        else:
            store = vc.open_store(path)
        with vc.Checkpointer(store, "checkpoint") as checkpointer:
            with pytest.raises(AccessDeniedError):
                checkpointer.save(1, {"w": torch.zeros(3)})
            target = {"w": torch.zeros(3)}
            assert checkpointer.load(target).step == 0
            assert target["w"].tolist() == [1, 1, 1]
