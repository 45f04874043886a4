from __future__ import annotations

import dataclasses
import uuid

import numpy as np
import torch

import vescale_ckpt as vc
from vescale_ckpt.collecting.repack_plan import Liveness, PackUse, Place, moved, plan_repack, stored_rows
from vescale_ckpt.format.manifest import decode_manifest, encode_manifest
from vescale_ckpt.format.records import ChunkTable, Manifest, PackRecord, TensorRecord
from vescale_ckpt.state.tree import DictNode, TensorNode
from vescale_storage.backend import ObjectInfo
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.collect.plan import Tally
from vescale_storage.collect.roots import Roots
from vescale_storage.pack import footer_bytes
from vescale_storage.refs import Ref, Tag

OLD = 1000.0
P, Q, R, S = (letter * 64 for letter in "abcd")


def manifest_of(*chunks: tuple[str, int, int], sizes=None, codec: int = 0) -> Manifest:
    """Return a manifest of one-dimensional tensors of uint8, one a chunk given as (pack, offset, length)."""
    packs = list(dict.fromkeys(pack for pack, _, _ in chunks))
    tensors = tuple(TensorRecord((f"t{i}",), "uint8", (length,), (length,)) for i, (_, _, length) in enumerate(chunks))
    num = len(chunks)
    table = ChunkTable(
        first=np.arange(num + 1, dtype=np.uint64),
        tile=np.zeros(num, np.uint32),
        digest=np.array([[hash(c) % 251, *[i for _ in range(31)]] for i, c in enumerate(chunks)], np.uint8).reshape(
            -1, 32
        ),
        pack=np.array([packs.index(pack) for pack, _, _ in chunks], np.uint32),
        offset=np.array([offset for _, offset, _ in chunks], np.uint64),
        length=np.array([length for _, _, length in chunks], np.uint32),
        codec=np.full(num, codec, np.uint8),
        partial_row=np.zeros(0, np.uint64),
        partial_box=np.zeros(0, np.uint64),
        partial_start=np.zeros(1, np.int64),
    )
    tree = DictNode(tuple((f"t{i}", TensorNode()) for i in range(num)))
    records = tuple(PackRecord(pack, (sizes or {}).get(pack, 1000)) for pack in packs)
    return Manifest("run", 1, 0.0, "0" * 32, 1, tree, tensors, table, records)


def digest_of(manifest: Manifest, row: int) -> bytes:
    return manifest.chunks.digest[row].tobytes()


# ---- how much is needed


def test_a_chunk_counts_once_however_many_manifests_and_tensors_have_it():
    live = Liveness()
    live.add(manifest_of((P, 0, 10), (P, 0, 10), (Q, 5, 7)))
    live.add(manifest_of((Q, 5, 7), (P, 10, 20)))
    live.add(manifest_of())
    assert live.live_bytes() == {P: 30 + footer_bytes(2), Q: 7 + footer_bytes(1)}


def test_a_pack_whose_chunks_are_all_needed_is_needed_whole_however_small():
    store = vc.Store(MemoryBackend(uuid.uuid4().hex), exists=False)
    with vc.Checkpointer(store, "run") as ckpt:
        ckpt.save(1, {"tiny": torch.arange(3, dtype=torch.uint8)})
    live = Liveness()
    manifest = store["run@1"].manifest
    live.add(manifest)
    assert live.live_bytes() == {pack.name: pack.size_bytes for pack in manifest.packs}


def test_nothing_is_needed_of_nothing():
    assert Liveness().live_bytes() == {}


# ---- what is worth it


def ref(step: int, manifest: str, *, version: int = 1, created: float = 0.0, transaction: str = "0" * 32) -> Ref:
    return Ref("run", step, version, manifest, transaction, created)


def plan(refs, packs_of, live, *, tags=(), sizes=None, young=(), **more):
    every = frozenset().union(*packs_of.values())
    roots = Roots(tuple(refs), tuple(tags), {m: frozenset(p) for m, p in packs_of.items()}, every)
    infos = {
        pack: ObjectInfo(key="", size_bytes=(sizes or {}).get(pack, 100), modified_seconds=OLD + (pack in young))
        for pack in every | {S}
    }
    return plan_repack(roots, infos, live, **{"foreign": [], "old_seconds": OLD, "rewritten": {}, **more})


def test_packs_of_which_less_than_half_is_needed_are_rewritten_with_the_snapshots_that_need_them():
    refs = [ref(1, "m1"), ref(2, "m2"), ref(3, "m3")]
    made = plan(refs, {"m1": {P, Q}, "m2": {P}, "m3": {R}}, {P: 49, Q: 50, R: 100})
    assert made.packs == (PackUse(P, 100, 49),)
    assert made.refs == tuple(refs[:2])
    assert made.reclaimed_bytes == 51
    assert made.pinned == Tally()


def test_what_is_not_needed_at_all_is_no_work():
    assert plan([ref(1, "m1")], {"m1": {Q}}, {Q: 100}).packs == (), "S is for the collection"


def test_young_packs_and_snapshots_stay_as_they_are():
    assert plan([ref(1, "m1")], {"m1": {P}}, {P: 1}, young={P}).packs == ()
    made = plan([ref(1, "m1", created=OLD + 1)], {"m1": {P}}, {P: 1})
    assert (made.packs, made.pinned) == ((), Tally(1, 100))


def test_tags_older_versions_and_newer_formats_hold_packs_where_they_are():
    held = ref(1, "m1")
    packs_of = {"m1": {P}, "m2": {P, Q}}
    live = {P: 1, Q: 1}
    for refs, more in (
        ([ref(2, "m2")], {"tags": [Tag("best", held, 0.0)]}),
        ([held, ref(2, "m2")], {"tags": [Tag("best", held, 0.0)]}),
        ([held, ref(1, "m3", version=2), ref(2, "m2")], {}),
        ([held, ref(2, "m2")], {"foreign": ["m1"]}),
    ):
        made = plan(refs, {**packs_of, "m3": set()}, live, **more)
        assert made.packs == (PackUse(Q, 100, 1),)
        assert [r.manifest for r in made.refs] == ["m2"]
        assert made.pinned == Tally(1, 100)


def test_a_manifest_that_a_tag_shares_with_a_ref_holds_its_packs():
    tag = Tag("best", Ref("other", 5, 1, "m1", "0" * 32, 0.0), 0.0)
    made = plan([ref(1, "m1")], {"m1": {P}}, {P: 1}, tags=[tag])
    assert (made.packs, made.refs) == ((), ())


def test_what_an_earlier_repacking_left_is_found():
    old, new = ref(1, "m1"), ref(1, "m2", version=2, transaction="e" * 32)
    packs_of = {"m1": {P}, "m2": {Q}}
    live = {P: 100, Q: 100}
    assert plan([old, new], packs_of, live, rewritten={"m1": "e" * 32}).replaced == (old,)
    assert plan([old, new], packs_of, live, rewritten={"m1": "f" * 32}).replaced == ()
    tags = [Tag("best", old, 0.0)]
    assert plan([old, new], packs_of, live, rewritten={"m1": "e" * 32}, tags=tags).replaced == ()


# ---- manifests that follow


def test_rows_of_some_packs_come_by_place():
    manifest = manifest_of((P, 50, 10), (Q, 0, 10), (P, 0, 50), (R, 0, 1))
    assert stored_rows(manifest, {P, R}) == [2, 0, 3]
    assert stored_rows(manifest, set()) == []


def test_a_moved_manifest_differs_only_in_where_things_are():
    old = manifest_of((P, 0, 10), (Q, 0, 20), (P, 30, 5))
    places = {digest_of(old, 0): Place(R, 7, 8, 1), digest_of(old, 2): Place(R, 0, 5, 0)}
    new = moved(old, places, {R: 500}, {P})
    assert list(new.packs) == [PackRecord(Q, 1000), PackRecord(R, 500)]
    assert new.chunks.pack.tolist() == [1, 0, 1]
    assert new.chunks.offset.tolist() == [7, 0, 0]
    assert new.chunks.length.tolist() == [8, 20, 5]
    assert new.chunks.codec.tolist() == [1, 0, 0]
    same = dataclasses.replace(new, chunks=old.chunks, packs=old.packs)
    assert same == old
    assert decode_manifest(encode_manifest(new)) == new


def test_chunks_that_were_not_copied_stay_where_they_are():
    old = manifest_of((P, 0, 10), (P, 10, 20), (Q, 0, 3))
    places = {digest_of(old, 0): Place(R, 0, 10, 0), digest_of(old, 2): Place(R, 10, 3, 0)}
    new = moved(old, places, {R: 500}, {P})
    assert [pack.name for pack in new.packs] == [P, Q, R]
    assert new.chunks.pack.tolist() == [2, 0, 1]
    assert moved(old, {}, {}, {P}) is None
    assert moved(old, places, {R: 500}, set()) is None


def test_a_new_pack_that_the_manifest_names_already_is_named_once():
    old = manifest_of((P, 0, 10), (Q, 0, 20))
    new = moved(old, {digest_of(old, 0): Place(Q, 20, 10, 0)}, {Q: 1000}, {P})
    assert new.packs == (PackRecord(Q, 1000),)
    assert new.chunks.pack.tolist() == [0, 0]
