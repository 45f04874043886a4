from __future__ import annotations

from vescale_ckpt.format.kinds import FragmentKind, Kind


def test_the_numbers_are_frozen():
    assert {kind.name: kind.value for kind in Kind} == {
        "HEAD": 1,
        "TREE": 2,
        "TENSORS": 3,
        "TENSOR_DTYPE": 16,
        "TENSOR_KIND": 17,
        "TENSOR_NDIM": 18,
        "TENSOR_SHAPE": 19,
        "TENSOR_TILE": 20,
        "TENSOR_ALIAS": 21,
        "CHUNK_FIRST": 32,
        "CHUNK_TILE": 33,
        "CHUNK_DIGEST": 34,
        "CHUNK_PACK": 35,
        "CHUNK_OFFSET": 36,
        "CHUNK_LENGTH": 37,
        "CHUNK_CODEC": 38,
        "PARTIAL_ROW": 39,
        "PARTIAL_BOX": 40,
        "PACK_NAME": 48,
        "PACK_SIZE": 49,
    }


def test_fragments_use_the_same_numbers_for_the_same_columns():
    shared = {kind.name for kind in Kind} & {kind.name for kind in FragmentKind}
    assert {"CHUNK_TILE", "CHUNK_CODEC", "PARTIAL_BOX", "PACK_SIZE"} <= shared
    assert all(Kind[name].value == FragmentKind[name].value for name in shared)
    assert {kind.name: kind.value for kind in FragmentKind if kind.name not in shared} == {
        "CHUNK_TENSOR": 32,
        "PARTIAL_NDIM": 41,
        "SHARE_ROW": 42,
        "SHARE_BOX": 43,
        "REPLICA_TENSOR": 56,
        "REPLICA_DIGEST": 57,
        "PER_RANK": 3,
    }
