from __future__ import annotations

import os
import time

import pytest

from tests.ckpt.collecting.runs import Runs
from vescale_ckpt.diagnosis.checks import Level
from vescale_ckpt.diagnosis.health import check_health
from vescale_ckpt.errors import UnsupportedVersionError
from vescale_storage import loop, root
from vescale_storage.collect.marks import encode_mark, split_marks
from vescale_storage.keys import STORE_KEY, fragment_key, pack_key

DAY = 86400.0


@pytest.fixture
def runs():
    made = Runs()
    made.save(1, same=0, own=1)
    made.save(2, same=0, own=2)
    return made


def levels(runs, now=None):
    return {check.name: check.level for check in check_health(runs.store, now=now or time.time())}


def test_a_store_that_is_well(runs):
    assert set(levels(runs).values()) == {Level.OK}
    before = runs.keys()
    details = {check.name: check.detail for check in check_health(runs.store, now=time.time())}
    assert details["snapshots"].startswith("1 runs, 2 refs, 0 tags")
    assert runs.keys() == before


def test_what_waits_to_be_collected(runs):
    runs.delete(1)
    runs.delete(2)
    runs.save(3, other=9)
    assert levels(runs)["garbage"] is Level.NOTE


def test_marks(runs):
    runs.delete(2)
    name = next(iter(runs.stored() - runs.needed()))
    for mark in split_marks([name], [], now=time.time(), grace_seconds=3600):
        loop.run(runs.inner.put(mark.key, encode_mark(mark)))
        key = mark.key
    assert levels(runs)["marks"] is Level.OK
    assert levels(runs, time.time() + 2 * DAY)["marks"] is Level.NOTE
    loop.run(runs.inner.put(key, [b"damaged"]))
    assert levels(runs)["marks"] is Level.BAD


def test_dead_saves(runs):
    loop.run(runs.inner.put(fragment_key(os.urandom(16).hex(), 0), [b"x"]))
    assert levels(runs)["dead saves"] is Level.OK, "it may be alive"
    assert levels(runs, time.time() + 2 * DAY)["dead saves"] is Level.NOTE


def test_strange_keys(runs):
    loop.run(runs.inner.put("packs/note.txt", [b"x"]))
    assert levels(runs)["strange keys"] is Level.NOTE


@pytest.mark.parametrize("what", ["ref", "pack"])
def test_what_cannot_be_read(runs, what):
    key = runs.store["run@1"].ref.key if what == "ref" else pack_key(next(iter(runs.packs(1))))
    loop.run(runs.inner.put(key, [b"?"]) if what == "ref" else runs.inner.delete(key))
    assert levels(runs)["snapshots"] is Level.BAD


def test_a_newer_store(runs):
    newer = root.encode_root(root.Root("0" * 32, (9, 0), "blake3-256", 0.0))
    loop.run(runs.inner.put(STORE_KEY, [newer]))
    with pytest.raises(UnsupportedVersionError):
        levels(runs)
