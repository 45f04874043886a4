"""C060 to C070: object stores that lie, refuse, forget or are asked for what they cannot do.

How each request to S3 fails and is tried again is tested beside the back ends; here, what a save and a load make of it.
"""

from __future__ import annotations

import uuid

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import vescale_ckpt as vc
from tests.cases.inputs import same_bits, tagged
from tests.cases.worlds import RUN, load, save, store_on
from vescale_ckpt.errors import (
    AccessDeniedError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
    StorageError,
)
from vescale_storage import loop
from vescale_storage.backends import open_backend
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.backends.parts import MAX_PART_BYTES, MAX_PARTS, MIN_PART_BYTES, plan_parts
from vescale_storage.wrappers.faults import FaultBackend
from vescale_storage.wrappers.retry import RetryBackend, RetryPolicy
from vescale_storage.wrappers.wrapper import WrapperBackend

STATE = {f"t{i}": tagged(700_000, start=i) for i in range(6)}
SMALL_PACKS = {"pack_bytes": 1 << 20, "host_budget_bytes": 32 << 20}
QUICK = RetryPolicy(first_delay_seconds=0.001, max_delay_seconds=0.002)


def faulty(state: dict | None = None) -> tuple[FaultBackend, vc.Store, dict]:
    """Return (a back end to script, a store with retries over it, a blank target of what the store holds)."""
    state = STATE if state is None else state
    backend = FaultBackend(MemoryBackend(uuid.uuid4().hex))
    store = store_on(RetryBackend(backend, QUICK))
    save(store, 1, lambda _: state, **SMALL_PACKS)
    return backend, store, {key: torch.full_like(value, -1) for key, value in state.items()}


class Remembers(MemoryFileSystem):
    """Answers from what it has seen, as file systems over object stores do, until it is told to forget it."""

    protocol = "remembers"
    store: dict = {}  # noqa: RUF012 -- a class attribute of fsspec's
    pseudo_dirs = [""]  # noqa: RUF012
    conditional_put = True

    def __init__(self, who: str, **options) -> None:
        super().__init__(**options)
        self.who = who
        self.seen: dict = {}

    def invalidate_cache(self, path=None):  # noqa: ARG002 -- fsspec's signature
        self.seen.clear()

    def ls(self, path, detail=True, **kwargs):
        key = ("ls", path, detail)
        if key not in self.seen:
            self.seen[key] = super().ls(path, detail=detail, **kwargs)
        return self.seen[key]

    def info(self, path, **kwargs):
        key = ("info", path)
        if key not in self.seen:
            self.seen[key] = super().info(path, **kwargs)
        return self.seen[key]

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if mode == "create" and super().exists(path):
            raise FileExistsError(path)
        super().pipe_file(path, value, mode="overwrite", **kwargs)


class TestC060ListingsThatAreOld:
    def check(self, a: vc.Store, b: vc.Store) -> None:
        """A and B are one store, seen by two processes."""
        save(b, 1, lambda _: {"w": tagged(10)}, step=1)
        assert [info.step for info in a.snapshots(RUN)] == [1]
        assert a.runs() == [RUN]
        save(b, 1, lambda _: {"w": tagged(10) + 1}, step=2)
        target = {"w": torch.zeros(10)}
        (report,) = load(a, 1, lambda _: target)
        assert report.step == 2
        assert same_bits(target["w"], tagged(10) + 1)
        save(b, 1, lambda _: {"w": tagged(5000) + 2, "more": tagged(3)}, step=2)  # the step again, and longer
        assert a[RUN].tensors()["w"].shape == (5000,)
        assert same_bits(a[RUN].read("w"), tagged(5000) + 2)

    def test_another_process_is_seen_at_once(self, tmp_path):
        self.check(vc.open_store(tmp_path), vc.open_store(tmp_path))

    @pytest.mark.s3
    def test_on_s3_too(self, s3_url):
        with (
            vc.open_store(s3_url.url, storage_options=s3_url.storage_options) as a,
            vc.open_store(s3_url.url, storage_options=s3_url.storage_options) as b,
        ):
            self.check(a, b)

    def test_and_through_a_file_system_that_remembers_what_it_saw(self):
        fsspec.register_implementation("remembers", Remembers, clobber=True)
        url = f"remembers://{uuid.uuid4().hex}"
        a, b = (open_backend(url, {"who": who}) for who in "ab")
        self.check(store_on(a), store_on(b))

    def test_an_object_that_grew_is_read_whole(self):
        fsspec.register_implementation("remembers", Remembers, clobber=True)
        url = f"remembers://{uuid.uuid4().hex}"
        a, b = (open_backend(url, {"who": who}) for who in "ab")
        loop.run(b.put("note", [b"short"]))
        assert loop.run(a.get("note")) == b"short"
        assert loop.run(a.head("note")).size_bytes == 5
        loop.run(b.put("note", [b"a longer one"]))
        assert loop.run(a.get("note")) == b"a longer one"
        assert loop.run(a.head("note")).size_bytes == 12


class Shifted(WrapperBackend):
    """Answers some reads of packs with the right number of bytes, one off."""

    def __init__(self, inner, times: int) -> None:
        super().__init__(inner)
        self.times = times

    async def get_into(self, key: str, offset: int, out: memoryview) -> None:
        await self.inner.get_into(key, offset, out)
        if key.startswith("packs/") and self.times > 0:
            self.times -= 1
            out[:] = bytes(out[1:]) + b"?"


class TestC062ReadsThatLie:
    @pytest.mark.parametrize("fault", ["truncate", "corrupt"])
    def test_one_bad_answer_is_asked_for_again(self, fault):
        backend, store, target = faulty()
        rule = getattr(backend, fault)("get_into", 7, prefix="packs/", skip=1)
        load(store, 1, lambda _: target)
        assert rule.num_hit == 1
        assert all(same_bits(target[key], value) for key, value in STATE.items())

    @pytest.mark.parametrize("fault", ["truncate", "corrupt"])
    def test_a_lasting_one_is_an_error_that_names_the_object_and_no_tensor_has_wrong_bytes(self, fault):
        backend, store, target = faulty()
        getattr(backend, fault)("get_into", 7, prefix="packs/", skip=1, times=10_000)
        with pytest.raises((CorruptionError, StorageError)) as caught:
            load(store, 1, lambda _: target)
        assert "packs/" in str(caught.value)
        for key, value in STATE.items():
            right = (target[key] == value) | (target[key] == -1)
            assert right.all(), key

    def test_the_right_length_from_the_wrong_place_once(self):
        _, store, target = faulty()
        shifted = Shifted(store.backend, 1)
        load(store_on(shifted, exists=True), 1, lambda _: target)
        assert shifted.times == 0
        assert all(same_bits(target[key], value) for key, value in STATE.items())

    def test_the_right_length_from_the_wrong_place_always(self):
        _, store, target = faulty()
        shifted = store_on(Shifted(store.backend, 10_000), exists=True)
        with pytest.raises(CorruptionError, match="packs/"):
            load(shifted, 1, lambda _: target)
        assert all(value.eq(-1).all() for value in target.values())

    def test_verify_first_touches_nothing(self):
        backend, store, target = faulty()
        backend.corrupt("get_into", 7, prefix="packs/", skip=1, times=10_000)
        with pytest.raises(CorruptionError) as caught:
            load(store, 1, lambda _: target, verify_first=True)
        assert "nothing of the state was changed" in str(caught.value)
        assert all(value.eq(-1).all() for value in target.values())


class TestC064UploadsThatBreakOff:
    @pytest.mark.parametrize("error", [AccessDeniedError("the token has expired"), StorageError("part 4 of 6 failed")])
    def test_the_save_fails_visibly_and_nothing_of_it_shows(self, error):
        backend, store, _ = faulty()
        packs = backend.fail("put_if_absent", error, prefix="packs/", skip=1, times=10_000)
        with pytest.raises(type(error), match=str(error)):
            save(store, 1, lambda _: {key: value + 50 for key, value in STATE.items()}, step=2, **SMALL_PACKS)
        assert packs.num_hit
        assert [info.step for info in store.snapshots(RUN)] == [1]
        target = {key: torch.zeros_like(value) for key, value in STATE.items()}
        load(store, 1, lambda _: target)
        assert all(same_bits(target[key], value) for key, value in STATE.items())

    def test_what_is_left_of_it_is_found_and_removed(self):
        backend, store, _ = faulty()
        before = store.gc(grace_seconds=0, dry_run=True).collection.plan
        assert not before.to_mark
        backend.fail("put_if_absent", AccessDeniedError("expired"), prefix="refs/", times=10_000)
        with pytest.raises(AccessDeniedError):
            save(store, 1, lambda _: {"new": tagged(500_000, start=77)}, step=2)
        backend.rules.clear()
        left = store.gc(grace_seconds=0, dry_run=True).collection.plan
        assert left.to_mark, "the packs that nobody refers to"
        store.gc(grace_seconds=0)
        store.gc(grace_seconds=0)
        assert not store.gc(grace_seconds=0, dry_run=True).collection.plan.to_mark
        assert same_bits(store[RUN].read("t0"), STATE["t0"])


class NeverMoves(MemoryFileSystem):
    """Has no rename, as object stores have none: copy and delete would show half of it to others."""

    protocol = "nevermoves"
    store: dict = {}  # noqa: RUF012 -- a class attribute of fsspec's
    pseudo_dirs = [""]  # noqa: RUF012
    conditional_put = True

    def mv(self, *_, **__):
        raise AssertionError("nothing may be moved")

    mv_file = cp_file = copy = move = rename = mv

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        super().pipe_file(path, value, mode=mode, **kwargs)


class TestC066NoRename:
    def test_a_save_and_its_commit_rename_nothing(self):
        fsspec.register_implementation("nevermoves", NeverMoves, clobber=True)
        store = vc.open_store(f"nevermoves://{uuid.uuid4().hex}")
        for step in (1, 2):
            save(store, 2, lambda _, step=step: {"w": tagged(1000) + step}, step=step)
        store.tag(RUN, 1, "best")
        store.gc(grace_seconds=0)
        assert same_bits(store[RUN].read("w"), tagged(1000) + 2)
        assert same_bits(store[f"{RUN}@best"].read("w"), tagged(1000) + 1)

    def test_the_commit_is_the_last_thing_that_a_snapshot_needs_and_is_one_put(self):
        backend = FaultBackend(MemoryBackend(uuid.uuid4().hex))
        save(store_on(backend), 1, lambda _: STATE, **SMALL_PACKS)
        writes = [op for op in backend.operations if op.verb.startswith("put")]
        (commit,) = [op for op in writes if op.key.startswith("refs/")]
        assert commit.verb == "put_if_absent"
        needed = [op for op in writes if op.key.startswith(("packs/", "manifests/"))]
        assert max(op.number for op in needed) < commit.number


class TestC068NothingIsInvented:
    @pytest.mark.parametrize(
        ("fault", "expected"),
        [
            ("gone", ObjectNotFoundError),
            (AccessDeniedError("403 on this object"), AccessDeniedError),
            (StorageError("connection broken", retryable=True), StorageError),
        ],
    )
    def test_a_chunk_that_cannot_be_had_is_an_error_with_its_object(self, fault, expected):
        backend, store, target = faulty()
        key = f"packs/{store[RUN].manifest.packs[1].name[:2]}/{store[RUN].manifest.packs[1].name}"
        if fault == "gone":
            loop.run(backend.inner.delete(key))
        else:
            backend.fail("get_into", fault, prefix=key, times=10_000)
        with pytest.raises(expected) as caught:
            load(store, 1, lambda _: target)
        text = f"{caught.value} {caught.value.__cause__} {getattr(caught.value, 'context', '')}"
        assert key in text, text
        if fault == "gone":
            assert any(name in text for name in STATE)
        for name, value in STATE.items():
            assert ((target[name] == value) | (target[name] == -1)).all()
        for name, value in STATE.items():  # each tensor by itself: right, or an error
            try:
                assert same_bits(store[RUN].read(name), value)
            except (StorageError, ObjectNotFoundError):
                continue

    def test_a_break_that_heals_is_not_noticed(self):
        backend, store, target = faulty()
        rule = backend.fail("get_into", StorageError("connection broken", retryable=True), prefix="packs/", times=2)
        load(store, 1, lambda _: target)
        assert rule.num_hit == 2
        assert all(same_bits(target[key], value) for key, value in STATE.items())


class TestC070Parts:
    @pytest.mark.parametrize(
        "total_bytes", [0, 1, 5 * 2**20, 5 * 2**20 + 1, 80 * 10**9, 320 * 2**30, 320 * 2**30 + 1, 5 * 2**40, None]
    )
    def test_parts_are_few_enough_and_large_enough_and_small_enough(self, total_bytes):
        part = plan_parts(total_bytes)
        assert MIN_PART_BYTES <= part <= MAX_PART_BYTES
        assert -(-(total_bytes or 0) // part) <= MAX_PARTS
        assert part == plan_parts(total_bytes), "it does not change while it is sent"
        if total_bytes is None:
            assert part * MAX_PARTS >= 5 * 2**40

    @pytest.mark.parametrize("total_bytes", [5 * 2**40 + 1, 2**60, -1])
    def test_what_no_parts_can_hold_is_refused_at_planning(self, total_bytes):
        with pytest.raises(InvalidInputError):
            plan_parts(total_bytes)
