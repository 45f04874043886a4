from __future__ import annotations

import time

import pytest

from tests.ckpt.collecting.runs import Runs
from vescale_ckpt.errors import ConflictError, CorruptionError, StoreNotFoundError, UnsupportedVersionError
from vescale_ckpt.mirroring.mirror import mirror_store
from vescale_ckpt.repairing.findings import Kind
from vescale_ckpt.repairing.mend import mend_store, recover
from vescale_ckpt.repairing.survey import survey_store
from vescale_storage import loop, root
from vescale_storage.collect.marks import encode_mark, split_marks
from vescale_storage.keys import STORE_KEY, index_key, manifest_key, pack_key


@pytest.fixture
def runs():
    made = Runs()
    made.save(1, same=0, own=1)
    made.save(2, same=0, own=2)
    return made


def flip(runs, key, at):
    data = bytearray(loop.run(runs.inner.get(key)))
    data[at] ^= 1
    loop.run(runs.inner.put(key, [bytes(data)]))


def cut(runs, key, num_bytes):
    data = loop.run(runs.inner.get(key))
    loop.run(runs.inner.put(key, [data[: len(data) - num_bytes]]))


def own_pack(runs, step=2, other=1):
    return (runs.packs(step) - runs.packs(other)).pop()


def kinds(survey):
    return [(finding.kind, finding.fix is not None) for finding in survey.findings]


def test_a_sound_store(runs):
    survey = survey_store(runs.inner, deep=True)
    assert survey.ok
    assert survey.findings == survey.orphans == ()
    assert (survey.num_snapshots, survey.num_packs, survey.num_chunks) == (2, 2, 3)
    assert survey.bytes_read == sum(len(loop.run(runs.inner.get(key))) for key in runs.keys("packs/"))
    assert survey_store(runs.inner).bytes_read == 0


def test_looking_writes_nothing(runs):
    flip(runs, pack_key(own_pack(runs)), -30)
    before = {key: loop.run(runs.inner.get(key)) for key in runs.keys("")}
    survey_store(runs.inner, deep=True)
    assert before == {key: loop.run(runs.inner.get(key)) for key in runs.keys("")}


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_a_footer_is_made_again_from_manifests(runs, how):
    key = pack_key(own_pack(runs))
    flip(runs, key, -30) if how == "flip" else cut(runs, key, 20)
    survey = survey_store(runs.inner)
    assert kinds(survey) == [(Kind.PACK, True)]
    assert survey.findings[0].snapshots == ("run@2",)
    assert [finding.key for finding in mend_store(runs.inner, survey).done] == [key]
    assert survey_store(runs.inner, deep=True).ok
    runs.check()


def test_chunks_come_from_other_packs_that_have_them(runs):
    # A second store's save of the same content, copied in: another pack with the same chunk.
    twin = Runs()
    twin.save(1, "twin", first=9, own=2)
    mirror_store(twin.store, runs.store)
    runs.saved["twin", 1] = twin.saved["twin", 1]
    flip(runs, pack_key(own_pack(runs)), 8)
    assert survey_store(runs.inner).ok, "a damaged chunk shows only when it is read"
    survey = survey_store(runs.inner, deep=True)
    assert kinds(survey) == [(Kind.PACK, True)]
    mend_store(runs.inner, survey)
    assert survey_store(runs.inner, deep=True).ok
    runs.check()


def test_a_chunk_that_nobody_else_has_is_lost_and_said_to_be(runs):
    flip(runs, pack_key(own_pack(runs)), 8)
    survey = survey_store(runs.inner, deep=True)
    assert kinds(survey) == [(Kind.PACK, False)]
    assert "no sound copy" in survey.findings[0].outlook
    assert mend_store(runs.inner, survey).done == []
    assert not survey.ok


def test_a_footer_of_which_manifests_know_a_part(runs):
    first = (runs.packs(1) & runs.packs(2)).pop()
    runs.delete(1)
    runs.collect_all()
    flip(runs, pack_key(first), -30)
    survey = survey_store(runs.inner)
    assert kinds(survey) == [(Kind.PACK, False)]
    assert "manifests know 1 of its chunks" in survey.findings[0].outlook


def test_a_mirror_has_what_is_gone(runs):
    copy = Runs()
    mirror_store(runs.store, copy.store)
    needed = runs.needed()
    loop.run(runs.inner.delete(manifest_key(runs.store["run@1"].ref.manifest)))
    for name in needed:
        loop.run(runs.inner.delete(pack_key(name)))
    alone = survey_store(runs.inner)
    assert not any(fix for _, fix in kinds(alone))
    assert "packs do not say which tensor" in alone.findings[0].outlook
    assert "no copy of it is left" in alone.findings[1].outlook
    survey = survey_store(runs.inner, mirrors=[copy.inner])
    assert all(fix for _, fix in kinds(survey))
    mend_store(runs.inner, survey, mirrors=[copy.inner])
    assert survey_store(runs.inner, deep=True).ok
    runs.check()


def test_index_objects_are_made_again_and_may_be_missing(runs):
    keys = [index_key(runs.store[f"run@{step}"].ref.manifest) for step in (1, 2)]
    before = [loop.run(runs.inner.get(key)) for key in keys]
    loop.run(runs.inner.delete(keys[0]))
    flip(runs, keys[1], 50)
    survey = survey_store(runs.inner)
    assert kinds(survey) == [(Kind.INDEX, True)] * 2
    assert survey.ok
    mend_store(runs.inner, survey)
    assert [loop.run(runs.inner.get(key)) for key in keys] == before


def test_a_root_that_is_gone(runs):
    loop.run(runs.inner.delete(STORE_KEY))
    survey = survey_store(runs.inner)
    assert kinds(survey) == [(Kind.ROOT, True)]
    mend_store(runs.inner, survey)
    runs.check()


def test_no_store_and_newer_ones():
    with pytest.raises(StoreNotFoundError):
        survey_store(Runs().inner)
    runs = Runs()
    runs.save(1, a=1)
    newer = root.encode_root(root.Root("0" * 32, (9, 0), "blake3-256", 0.0))
    loop.run(runs.inner.put(STORE_KEY, [newer]))
    with pytest.raises(UnsupportedVersionError):
        survey_store(runs.inner)


def test_a_damaged_ref_whose_manifest_is_the_only_one_left(runs):
    ref = runs.store["run@2"].ref
    flip(runs, ref.key, 100)
    survey = survey_store(runs.inner)
    assert kinds(survey) == [(Kind.REF, True)]
    assert survey.orphans[0].name == ref.manifest
    mend_store(runs.inner, survey)
    again = survey_store(runs.inner)
    assert again.findings == again.orphans == ()
    runs.check()
    assert ref.key not in runs.keys("refs/")


def test_a_damaged_ref_that_a_newer_version_has_replaced(runs):
    ref = runs.store["run@2"].ref
    runs.save(2, same=0, own=3)
    flip(runs, ref.key, 100)
    mend_store(runs.inner, survey_store(runs.inner))
    assert survey_store(runs.inner).findings == ()
    runs.check()


def test_a_damaged_ref_that_a_tag_has_kept(runs):
    ref = runs.store["run@2"].ref
    before = loop.run(runs.inner.get(ref.key))
    runs.store.tag("run", 2, "best")
    flip(runs, ref.key, 100)
    mend_store(runs.inner, survey_store(runs.inner))
    assert loop.run(runs.inner.get(ref.key)) == before


def test_a_damaged_ref_of_which_nobody_knows_what_it_meant(runs):
    runs.delete(2)
    runs.save(2, same=0, own=3)  # two whole manifests of the step, one of them deleted
    flip(runs, runs.store["run@2"].ref.key, 100)
    survey = survey_store(runs.inner)
    assert kinds(survey) == [(Kind.REF, False)]
    assert "2 whole manifests" in survey.findings[0].outlook


def test_a_damaged_tag_and_strange_keys(runs):
    runs.store.tag("run", 2, "best")
    flip(runs, "refs/run/tags/best", 100)
    for key in ("refs/notes.txt", "packs/zz", "manifests/zz"):
        loop.run(runs.inner.put(key, [b"?"]))
    survey = survey_store(runs.inner)
    assert sorted(kinds(survey)) == [(Kind.STRANGE, False)] * 3 + [(Kind.TAG, False)]


def test_a_deleted_snapshot_is_brought_back(runs):
    runs.store.delete("run", 2)
    orphan = survey_store(runs.inner).orphans[0]
    assert (orphan.run, orphan.step, orphan.num_missing) == ("run", 2, 0)
    assert recover(runs.inner, orphan).version == 1
    runs.check()
    assert survey_store(runs.inner).orphans == ()


def test_what_cannot_be_brought_back(runs):
    name = own_pack(runs)
    runs.store.delete("run", 2)
    orphan = survey_store(runs.inner).orphans[0]
    for mark in split_marks([name], [], now=time.time(), grace_seconds=3600):
        loop.run(runs.inner.put(mark.key, encode_mark(mark)))
    with pytest.raises(ConflictError, match="marked"):
        recover(runs.inner, orphan)
    loop.run(runs.inner.delete(pack_key(name)))
    orphan = survey_store(runs.inner).orphans[0]
    assert orphan.num_missing == 1
    with pytest.raises(CorruptionError, match="1 of its"):
        recover(runs.inner, orphan)
