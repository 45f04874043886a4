from __future__ import annotations

import threading
import uuid

import pytest
import torch

import vescale_ckpt as vc
from vescale_ckpt.errors import ConfigError, CorruptionError, SnapshotNotFoundError, StoreNotFoundError
from vescale_ckpt.store import Store
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.keys import STORE_KEY
from vescale_storage.refs import set_tag
from vescale_storage.wrappers.faults import FaultBackend


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}"


def save(store, run, step, value=0.0):
    with vc.Checkpointer(store, run) as checkpointer:
        return checkpointer.save(step, {"w": torch.full((3,), value)}).result()


async def _keys(backend):
    return [info.key async for info in backend.list("")]


def test_opening_makes_nothing_and_the_first_save_makes_the_store(url):
    store = vc.open_store(url)
    assert loop.run(_keys(store.backend)) == []
    for look in (store.runs, lambda: store.snapshots("r"), lambda: store["r@1"]):
        with pytest.raises(StoreNotFoundError, match="there is no store at memory://"):
            look()
    save(store, "r", 1)
    assert STORE_KEY in loop.run(_keys(store.backend))
    assert store.runs() == ["r"]


def test_a_store_that_is_not_there_is_not_opened_for_reading(url):
    with pytest.raises(StoreNotFoundError):
        vc.open_store(url, create=False)
    save(vc.open_store(url), "r", 1)
    assert vc.open_store(url, create=False).runs() == ["r"]


def test_runs_and_snapshots_are_listed_in_order(url):
    store = vc.open_store(url)
    for run, step in (("b run", 10), ("b run", 9), ("a[0]*?#%20", 1), ("b run", 100)):
        save(store, run, step)
    save(store, "b run", 9, 2.0)
    loop.run(set_tag(store.backend, "b run", "best", 10, now=0.0))
    loop.run(set_tag(store.backend, "b run", "also", 10, now=0.0))
    assert store.runs() == ["a[0]*?#%20", "b run"]
    listed = store.snapshots("b run")
    assert [(info.name, info.version, info.tags) for info in listed] == [
        ("b run@9", 2, ()),
        ("b run@10", 1, ("also", "best")),
        ("b run@100", 1, ()),
    ]
    assert all(info.created_seconds > 0 for info in listed)


def test_snapshots_are_found_by_step_by_tag_and_as_the_newest(url):
    store = vc.open_store(url)
    for step in (9, 10):
        save(store, "r", step, float(step))
    loop.run(set_tag(store.backend, "r", "best", 9, now=0.0))
    assert {name: store[name].step for name in ("r@9", "r@best", "r", "r@10")} == {
        "r@9": 9,
        "r@best": 9,
        "r": 10,
        "r@10": 10,
    }
    assert store["r@best"].read("w").tolist() == [9, 9, 9]
    assert store.newest("r").step == 10
    assert store.newest("other") is None


def test_a_step_saved_again_is_read_in_its_newest_version(url):
    store = vc.open_store(url)
    assert [save(store, "r", 1, value).version for value in (1.0, 2.0)] == [1, 2]
    assert store["r@1"].read("w").tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("r@7", ["'r@7'", "the run has the steps 1, 12"]),
        ("r@best", ["'r@best'", "the run has the steps 1, 12"]),
        ("other", ["any snapshot of run 'other'", "its runs are 'r'"]),
        ("other@3", ["'other@3'", "its runs are 'r'"]),
    ],
)
def test_what_is_not_there_is_told_with_what_is(url, name, words):
    store = vc.open_store(url)
    save(store, "r", 1)
    save(store, "r", 12)
    with pytest.raises(SnapshotNotFoundError) as caught:
        store[name]
    for word in words:
        assert word in str(caught.value)


def test_a_long_list_of_steps_is_shortened(url):
    store = vc.open_store(url)
    for step in range(12):
        save(store, "r", step)
    with pytest.raises(SnapshotNotFoundError, match=r"\.\.\. 4, 5, 6, 7, 8, 9, 10, 11$"):
        store["r@99"]


@pytest.mark.parametrize("name", ["", "@1", "r@", "r@1@2", "a/b@1"])
def test_names_that_are_none_are_refused(url, name):
    store = vc.open_store(url)
    save(store, "r", 1)
    with pytest.raises(ConfigError):
        store[name]


def test_a_place_that_holds_something_else_is_no_store(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"it is not a store, it holds 'notes.txt'"):
        vc.open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_damaged_root_is_told(url):
    store = vc.open_store(url)
    save(store, "r", 1)
    loop.run(store.backend.put(STORE_KEY, [b"{}"]))
    with pytest.raises(CorruptionError, match=STORE_KEY):
        vc.open_store(url)


@pytest.mark.parametrize("bad", ["", "nosuchscheme://x", "simplecache::s3://x"])
def test_urls_that_are_none_are_refused(bad):
    with pytest.raises(ConfigError):
        vc.open_store(bad)


def test_options_that_nobody_knows_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="colour"):
        vc.open_store(tmp_path, storage_options={"colour": "red"})


def test_what_the_store_did_is_counted(url):
    store = vc.open_store(url)
    save(store, "r", 1)
    before = store.counts
    assert before.up_bytes > 0
    store["r@1"].read("w")
    after = store.counts - before
    assert after.up_bytes == 0
    assert after.down_bytes >= 12
    assert after.num_requests >= 2
    assert Store(MemoryBackend("uncounted"), exists=False).counts is None


def test_manifests_are_read_once_and_the_last_few_are_kept():
    faults = FaultBackend(MemoryBackend(uuid.uuid4().hex))
    save(Store(faults, exists=False), "r", 0)
    for step in range(1, 8):
        save(Store(faults, exists=True), "r", step)
    store = Store(faults, exists=True)

    def num_fetched(step):
        before = len(faults.operations)
        assert store[f"r@{step}"].manifest.step == step
        return sum(o.key.startswith("manifests/") for o in faults.operations[before:])

    assert [num_fetched(step) for step in (0, 0, 1, 2, 3, 3, 0)] == [1, 0, 1, 1, 1, 0, 0]
    assert [num_fetched(step) for step in (4, 1)] == [1, 1], "the one used longest ago is forgotten"


def test_threads_may_share_a_store(url):
    store = vc.open_store(url)
    for step in range(6):
        save(store, "r", step, float(step))
    errors = []

    def work(number):
        for i in range(20):
            step = (number + i) % 6
            if store[f"r@{step}"].read("w").tolist() != [step] * 3:
                errors.append(step)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def test_a_store_closes_and_a_second_time_does_nothing(tmp_path):
    with vc.open_store(tmp_path / "s") as store:
        save(store, "r", 1)
    store.close()
    assert vc.open_store(tmp_path / "s").runs() == ["r"]
