"""What a save does about packs that a collection has marked: nothing new refers to them, at no cost in correctness."""

from __future__ import annotations

import logging
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

import vescale_ckpt as vc
from tests.ckpt.collecting.runs import HOUR, Runs, tensor
from tests.distributed.threads import all_well, run_ranks
from tests.faults.gate import Gate, Standing
from vescale_ckpt.errors import ConflictError, RankFailureError
from vescale_ckpt.execute.dedup import DedupIndex
from vescale_ckpt.interop.dcp import DCPWriter
from vescale_storage import loop
from vescale_storage.collect.marks import Mark, Marked, encode_mark, new_mark_name
from vescale_storage.keys import pack_key
from vescale_storage.pack import read_footer
from vescale_storage.wrappers.count import CountingBackend


def put_mark(runs: Runs, packs, grace_seconds: float = HOUR) -> str:
    mark = Mark(new_mark_name(runs.now), runs.now, grace_seconds, frozenset(packs), frozenset())
    loop.run(runs.inner.put(mark.key, encode_mark(mark)))
    return mark.key


def test_the_index_leaves_out_the_chunks_of_some_packs():
    runs = Runs()
    runs.save(1, a=1)
    runs.save(2, a=1, b=2)
    manifest = runs.store["run@2"].manifest
    first, second = (pack.name for pack in manifest.packs)
    for left_out, left in ((set(), {first, second}), ({first}, {second}), ({first, second}, set())):
        index = DedupIndex([manifest, manifest], left_out)
        found = {found.pack.name for row in range(2) if (found := index.find(manifest.chunks.digest[row].tobytes()))}
        assert found == left
    everything = DedupIndex([manifest], Marked(unreadable=("gc/mark-x",)))
    assert everything.find(manifest.chunks.digest[0].tobytes()) is None


def test_what_is_marked_is_written_again_under_a_name_of_its_own():
    runs = Runs()
    runs.save(1, a=1, b=2)
    (old,) = runs.packs(1)
    put_mark(runs, [old])
    report = runs.save(2, a=1, b=2)
    (new,) = runs.packs(2)
    assert (report.bytes_deduplicated, new != old) == (0, True)
    size = loop.run(runs.inner.head(pack_key(new))).size_bytes
    entries = loop.run(read_footer(runs.inner, new, size))
    assert [entry.length for entry in entries] == [8192, 8192, 16], "random bytes give it its name"
    assert report.bytes_written == size
    runs.check()
    loop.run(runs.inner.delete(pack_key(old)))
    assert runs.store["run@2"].verify().ok, "it needs nothing that was marked"
    again = runs.save(3, a=1, b=2)
    assert again.bytes_deduplicated == 2 * 8192


def test_only_what_is_marked_is_written_again():
    runs = Runs()
    runs.save(1, a=1)
    runs.save(2, a=1, b=2)
    put_mark(runs, runs.packs(1))
    report = runs.save(3, a=1, b=2)
    assert report.bytes_deduplicated == 8192
    assert runs.packs(3).isdisjoint(runs.packs(1))


def test_a_mark_that_cannot_be_read_costs_space_but_no_save(caplog):
    runs = Runs()
    runs.save(1, a=1)
    key = put_mark(runs, ["ab" * 32])
    loop.run(runs.inner.put(key, [b"damage"]))
    with caplog.at_level(logging.WARNING):
        report = runs.save(2, a=1)
    assert report.bytes_deduplicated == 0
    assert key in caplog.text
    runs.check()


def test_without_marks_a_save_costs_two_listings_more():
    runs = Runs()
    runs.save(1, a=1)
    counted = CountingBackend(runs.inner)
    runs.save(2, store=runs.on(counted), a=2)
    # gc/ before and after, refs of the run for the base and of the step for the commit
    assert counted.counts.requests["list"] == 4


@pytest.mark.parametrize("prefix", ["packs/", "manifests/", "refs/"])
def test_what_is_marked_while_a_save_is_under_way_is_committed_in_good_time(prefix):
    runs = Runs()
    runs.save(1, a=1)
    gate = Gate(runs.inner, 0, verb="put_if_absent", prefix=prefix)
    saving = Standing(gate, lambda: runs.save(2, store=runs.on(gate), a=1, b=2))
    assert saving.stands
    put_mark(runs, runs.packs(1))
    assert saving.finish().bytes_deduplicated == 8192
    runs.check()


def test_a_save_that_took_half_the_grace_period_does_not_commit_what_was_marked_meanwhile():
    runs = Runs()
    runs.save(1, a=1)
    gate = Gate(runs.inner, 0, verb="put_if_absent", prefix="manifests/")
    saving = Standing(gate, lambda: runs.save(2, store=runs.on(gate), a=1, b=2))
    put_mark(runs, runs.packs(1), grace_seconds=0.2)
    time.sleep(0.11)
    with pytest.raises(ConflictError, match=r"save took 0 s, .* has marked 1 of its packs"):
        saving.finish()
    runs.check()
    assert runs.save(3, a=1, b=2).bytes_deduplicated == 0


def test_the_save_is_tried_again_on_all_ranks_where_that_is_asked_for():
    runs = Runs()
    runs.save(1, a=1)
    gate = Gate(runs.inner, 0, verb="put_if_absent", prefix="manifests/")

    def body(group):
        store = runs.on(gate if group.rank == 0 else runs.inner)
        checkpointer = vc.Checkpointer(store, "run", options=vc.SaveOptions(retries=1, deadline_seconds=30))
        checkpointer._group_made = group
        with checkpointer:
            return checkpointer.save(2, {"a": tensor(1)}).result()

    saving = Standing(gate, lambda: run_ranks(2, body))
    put_mark(runs, runs.packs(1), grace_seconds=0.0)
    reports = all_well(saving.finish())
    assert [report.attempts for report in reports] == [2, 2]
    assert runs.packs(2).isdisjoint(runs.packs(1))


def test_the_other_ranks_hear_of_it():
    runs = Runs()
    runs.save(1, a=1)
    gate = Gate(runs.inner, 0, verb="put_if_absent", prefix="manifests/")

    def body(group):
        store = runs.on(gate if group.rank == 0 else runs.inner)
        checkpointer = vc.Checkpointer(store, "run", options=vc.SaveOptions(deadline_seconds=30))
        checkpointer._group_made = group
        with checkpointer:
            return checkpointer.save(2, {"a": tensor(1)}).result()

    saving = Standing(gate, lambda: run_ranks(2, body))
    put_mark(runs, runs.packs(1), grace_seconds=0.0)
    outcomes = saving.finish()
    assert isinstance(outcomes[0], ConflictError)
    assert isinstance(outcomes[1], RankFailureError)
    assert "grace period" in str(outcomes[1])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_heeds_marks_too():
    runs = Runs()
    state = {"a": tensor(1)}
    for step in (1, 2, 3):
        if step == 3:
            put_mark(runs, runs.packs(1))
        dcp.save(state, storage_writer=DCPWriter(runs.store, "run", step), no_dist=True)
    assert runs.packs(2) == runs.packs(1)
    assert runs.packs(3).isdisjoint(runs.packs(1))
    assert torch.equal(runs.store["run@3"].read("a"), tensor(1))
