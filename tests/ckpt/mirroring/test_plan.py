from __future__ import annotations

import dataclasses

from vescale_ckpt.mirroring.plan import plan_mirror
from vescale_storage.collect.marks import Marked
from vescale_storage.refs import Ref, Tag


def name(number):
    return f"{number:064x}"


def ref(step, manifest, seconds=0.0):
    return Ref("run", step, 1, name(manifest), f"{step:032x}", seconds)


A, B = ref(1, 10, 5.0), ref(2, 20, 3.0)
PACKS = {A.manifest: {"x": 100, "y": 50}, B.manifest: {"y": 50, "z": 7}}


def plan(refs=(A, B), tags=(), **given):
    options = {"there": {}, "tags_there": {}, "packs_there": {}, "marked": Marked()} | given
    return plan_mirror(list(refs), list(tags), PACKS, **options)


def test_a_pack_is_copied_once_by_the_first_commit_that_needs_it():
    found = plan()
    assert [(copy.ref, dict(copy.packs)) for copy in found.copies] == [(B, {"y": 50, "z": 7}), (A, {"x": 100})]
    assert (found.num_bytes, found.num_packs) == (157, 3)


def test_what_is_there_is_not_copied_unless_its_size_is_wrong():
    found = plan(packs_there={"x": 100, "y": 49})
    assert [dict(copy.packs) for copy in found.copies] == [{"y": 50, "z": 7}, {}]


def test_snapshots_that_are_there():
    found = plan(there={A.key: A})
    assert found.present == (A,)
    assert [copy.ref for copy in found.copies] == [B]


def test_another_snapshot_under_the_same_name_is_left_alone():
    other = dataclasses.replace(A, manifest=name(99))
    found = plan(there={A.key: other, B.key: None})
    assert found.copies == ()
    assert len(found.conflicts) == 2


def test_what_is_about_to_be_deleted_is_not_referred_to():
    found = plan(marked=Marked(frozenset({"z"})))
    assert found.held_back == ("run@2",)
    assert [dict(copy.packs) for copy in found.copies] == [{"x": 100, "y": 50}]
    assert plan(marked=Marked(unreadable=("gc/mark",))).copies == ()


def test_tags_come_with_their_snapshots():
    tags = [Tag("a", A, 0.0), Tag("b", B, 0.0)]
    assert plan(tags=tags).tags == tuple(tags)
    assert plan(tags=tags, marked=Marked(frozenset({"z"}))).tags == (tags[0],)
    there = {tags[0].key: tags[0], tags[1].key: Tag("b", A, 0.0)}
    found = plan(tags=tags, tags_there=there)
    assert found.tags == ()
    assert len(found.conflicts) == 1
