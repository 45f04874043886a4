"""Where loads read from: the store, behind its cache, beside its mirror."""

from __future__ import annotations

import shutil
import uuid

import pytest
import torch

import vescale_ckpt as vc
from vescale_ckpt.errors import ConfigError, CorruptionError, MismatchError, SnapshotNotFoundError
from vescale_storage import loop
from vescale_storage.backends import open_backend
from vescale_storage.keys import manifest_key, pack_key
from vescale_storage.wrappers.cache import CacheBackend
from vescale_storage.wrappers.faults import FaultBackend
from vescale_storage.wrappers.mirror import MirrorBackend

SHAPE = (600, 400)


def state(value=1.0):
    generator = torch.Generator().manual_seed(5)
    return {"w": torch.rand(SHAPE, generator=generator) + value, "b": torch.arange(77.0) * value, "step": 3}


def blank():
    return {"w": torch.zeros(SHAPE), "b": torch.zeros(77), "step": 0}


def same(left, right):
    return all(torch.equal(left[key], right[key]) for key in ("w", "b")) and left["step"] == right["step"]


def save(store, step=1, value=1.0):
    with vc.Checkpointer(store, "run", options=vc.SaveOptions(pack_bytes=1 << 20)) as checkpointer:
        checkpointer.save(step, state(value))


def load(store, value=1.0):
    """Load everything, compare it, and return the report."""
    target = blank()
    with vc.Checkpointer(store, "run") as checkpointer:
        report = checkpointer.load(target)
    assert same(target, state(value))
    return report


def keys_of(store, prefix):
    async def run():
        return [info.key async for info in store.backend.list(prefix)]

    return loop.run(run())


# ---- cache


def is_data(operation):
    """Return whether it is about a pack or a manifest; refs are small, and always asked for."""
    return operation.key.startswith(("packs/", "manifests/"))


@pytest.fixture
def asked(monkeypatch):
    """Every operation that any store, opened from now on, asks of its storage."""
    operations = []

    def open_recorded(*arguments):
        backend = FaultBackend(open_backend(*arguments))
        backend.operations = operations
        return backend

    monkeypatch.setattr("vescale_ckpt.store.open_backend", open_recorded)
    return operations


def check_cache(open_place, tmp_path, asked):
    with open_place() as store:
        save(store)
    asked.clear()
    with open_place(cache_dir=tmp_path / "cache") as store:
        load(store)
        assert store.reading.missed_bytes > 600 * 400 * 4
    assert any(map(is_data, asked))
    asked.clear()
    with open_place(cache_dir=tmp_path / "cache") as store:
        report = load(store)
        assert (report.reread, report.healed) == (0, 0)
        assert store.reading.missed_bytes == 0
        assert store.counts.down_bytes < 2000, "the ref and the store's own record"
        assert torch.equal(store["run@1"].read("w", slice(100, 200)), state()["w"][100:200])
        assert same(store["run@1"].state_dict(), state())
    assert [operation for operation in asked if is_data(operation)] == []


def test_a_second_load_makes_no_data_request(tmp_path, asked):
    check_cache(lambda **options: vc.open_store(tmp_path / "store", **options), tmp_path, asked)


@pytest.mark.s3
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_a_second_load_from_s3_makes_no_data_request(s3_url, tmp_path, client, asked):
    options = s3_url.storage_options | {"client": client}
    check_cache(lambda **more: vc.open_store(s3_url.url, storage_options=options, **more), tmp_path, asked)


def test_savers_verifiers_and_collectors_pass_the_cache_by(tmp_path):
    with vc.open_store(tmp_path / "store") as store:
        save(store)
    with vc.open_store(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
        load(store)
        assert isinstance(store.reading, CacheBackend)
        (key, *_) = keys_of(store, "packs/")
        path = tmp_path / "store" / key
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)
        assert not store["run@1"].verify().ok, "the store's own bytes are judged, not those of the cache"
        load(store)


def test_a_damaged_cache_costs_reads_and_nothing_else(tmp_path, asked):
    with vc.open_store(tmp_path / "store") as store:
        save(store)
    for damage in (lambda data: data[:-1], lambda data: data[:100] + b"?" + data[101:], lambda _: b""):
        with vc.open_store(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
            load(store)
        for path in (tmp_path / "cache").glob("v1/objects/*/*/*"):
            path.write_bytes(damage(path.read_bytes()))
        asked.clear()
        with vc.open_store(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
            assert load(store).reread == 0
        assert any(map(is_data, asked))


@pytest.mark.parametrize("cache_bytes", [0, -1, 2**20])
def test_a_cache_too_small_is_refused(tmp_path, cache_bytes):
    with pytest.raises(ConfigError, match="cache"):
        vc.open_store(tmp_path / "store", cache_dir=tmp_path / "cache", cache_bytes=cache_bytes)


# ---- mirror


@pytest.fixture
def mirrored(tmp_path):
    """A store with a snapshot, a copy of it, and how to open both as one."""
    with vc.open_store(tmp_path / "store") as store:
        save(store)
        manifest = store["run@1"].ref.manifest
    shutil.copytree(tmp_path / "store", tmp_path / "mirror")

    def open_both(**options):
        return vc.open_store(tmp_path / "store", mirror=tmp_path / "mirror", **options)

    packs = sorted(path for path in (tmp_path / "store" / "packs").rglob("*") if path.is_file())
    return open_both, packs, tmp_path / "store" / manifest_key(manifest)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a chunk": lambda packs, _: flip(packs[0], 7),
    "a footer": lambda packs, _: flip(packs[0], -20),
    "a pack lost": lambda packs, _: packs[0].unlink(),
    "a pack cut": lambda packs, _: packs[0].write_bytes(packs[0].read_bytes()[:200]),
    "every pack": lambda packs, _: [flip(path, 7) for path in packs],
    "the manifest": lambda _, manifest: flip(manifest, 50),
    "the manifest lost": lambda _, manifest: manifest.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("cached", [False, True])
def test_loads_read_around_damage_and_healing_ends_it(mirrored, damage, cached, tmp_path, caplog):
    open_both, packs, manifest = mirrored
    options = {"cache_dir": tmp_path / "cache"} if cached else {}
    contents = {path: path.read_bytes() for path in [*packs, manifest]}
    DAMAGE[damage](packs, manifest)
    damaged = {path: path.read_bytes() if path.exists() else None for path in contents}
    with open_both(**options) as store:
        assert isinstance(store.reading.copies()[1].inner, type(store.backend.inner.inner))
        load(store)
        assert str(tmp_path / "mirror") in caplog.text
        assert same(store["run"].state_dict(), state())
        assert {path: path.read_bytes() if path.exists() else None for path in contents} == damaged
        report = store.heal("run@1")
        assert report.ok
        assert report.snapshot == "run@1"
        assert report.checked == len(packs) + 1
        root = tmp_path / "store"
        wanted = {path for path, content in contents.items() if damaged[path] != content}
        assert {root / key for key in report.healed} == wanted
        assert {path: path.read_bytes() for path in contents} == contents
        assert store.heal("run").healed == ()
    caplog.clear()
    with open_both(**options) as store:
        assert (load(store).healed, caplog.text) == (0, "")
        assert store["run"].verify().ok


def test_what_no_copy_has_is_lost_and_told(mirrored, tmp_path):
    open_both, packs, manifest = mirrored
    mirror = tmp_path / "mirror"
    for path in packs:
        flip(path, 7)
    flip(mirror / packs[0].relative_to(tmp_path / "store"), 7)
    with open_both() as store:
        with pytest.raises(CorruptionError, match="on two reads") as caught:
            load(store)
        assert str(mirror) in str(caught.value)
        report = store.heal("run@1")
        assert not report.ok
        (line,) = report.lost
        assert packs[0].name in line
        assert len(report.healed) == len(packs) - 1
        flip(manifest, 50)
        flip(mirror / manifest.relative_to(tmp_path / "store"), 50)
    with open_both() as store, pytest.raises(CorruptionError, match="cannot repair"):
        store.heal("run@1")


def test_refs_come_from_the_store_alone(mirrored, tmp_path):
    open_both, _, _ = mirrored
    with vc.open_store(tmp_path / "store") as store:
        save(store, step=2, value=2.0)
        store.delete("run", 1)
    with open_both() as store:
        assert [info.step for info in store.snapshots("run")] == [2]
        load(store, value=2.0)
        with pytest.raises(SnapshotNotFoundError):
            store.heal("run@1")


def test_a_mirror_is_never_written(mirrored, tmp_path):
    open_both, packs, _ = mirrored
    before = sorted(path for path in (tmp_path / "mirror").rglob("*") if path.is_file())
    flip(packs[0], 7)
    with open_both() as store:
        save(store, step=2, value=2.0)
        store.heal("run@1")
        store.gc(grace_seconds=0)
    assert sorted(path for path in (tmp_path / "mirror").rglob("*") if path.is_file()) == before


def test_without_a_mirror_there_is_nothing_to_heal_from(tmp_path):
    with vc.open_store(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
        save(store)
        with pytest.raises(ConfigError, match="open the store with mirror="):
            store.heal("run@1")


def test_a_store_that_others_read_while_it_is_healed(mirrored):
    open_both, packs, _ = mirrored
    flip(packs[0], 7)
    seen = []
    with open_both() as store:
        store.heal("run@1", progress=lambda size: seen.append((size, load(store).step)))
        assert [step for _, step in seen] == [1] * len(packs)
        assert sorted(size for size, _ in seen) == sorted(path.stat().st_size for path in packs)


def test_a_wrong_target_is_still_refused_before_anything_is_read(mirrored):
    open_both, _, _ = mirrored
    with open_both() as store, vc.Checkpointer(store, "run") as checkpointer, pytest.raises(MismatchError):
        checkpointer.load({"w": torch.zeros(3), "b": torch.zeros(77), "step": 0})


@pytest.mark.s3
def test_a_mirror_on_s3(s3_url, tmp_path):
    """The usual case: a fast store near by and a copy far away."""
    name = uuid.uuid4().hex
    with vc.open_store(tmp_path / "store") as store:
        save(store)
        far = vc.open_store(f"{s3_url.url}/{name}", storage_options=s3_url.storage_options)
        for prefix in ("packs/", "manifests/"):
            for key in keys_of(store, prefix):
                loop.run(far.backend.put(key, [loop.run(store.backend.get(key))]))
        far.close()
        lost = tmp_path / "store" / pack_key(store["run@1"].manifest.packs[0].name)
    content = lost.read_bytes()
    lost.unlink()
    with vc.open_store(
        tmp_path / "store", mirror=f"{s3_url.url}/{name}", mirror_storage_options=s3_url.storage_options
    ) as store:
        load(store)
        assert isinstance(store.reading, MirrorBackend)
        assert store.reading.num_helped > 0
        assert store.heal("run@1").ok
    assert lost.read_bytes() == content
