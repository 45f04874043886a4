"""The numbers of a manifest's sections: never used again for something else."""

from __future__ import annotations

import enum


class Kind(enum.IntEnum):
    """A section of a manifest."""

    HEAD = 1
    TREE = 2
    TENSORS = 3
    TENSOR_DTYPE = 16
    TENSOR_KIND = 17
    TENSOR_NDIM = 18
    TENSOR_SHAPE = 19
    TENSOR_TILE = 20
    TENSOR_ALIAS = 21
    CHUNK_FIRST = 32
    CHUNK_TILE = 33
    CHUNK_DIGEST = 34
    CHUNK_PACK = 35
    CHUNK_OFFSET = 36
    CHUNK_LENGTH = 37
    CHUNK_CODEC = 38
    PARTIAL_ROW = 39
    PARTIAL_BOX = 40
    PACK_NAME = 48
    PACK_SIZE = 49


class FragmentKind(enum.IntEnum):
    """A section of a fragment."""

    HEAD = 1
    TREE = 2
    PER_RANK = 3
    CHUNK_TENSOR = 32
    CHUNK_TILE = 33
    CHUNK_DIGEST = 34
    CHUNK_PACK = 35
    CHUNK_OFFSET = 36
    CHUNK_LENGTH = 37
    CHUNK_CODEC = 38
    PARTIAL_ROW = 39
    PARTIAL_BOX = 40
    PARTIAL_NDIM = 41
    SHARE_ROW = 42
    SHARE_BOX = 43
    PACK_NAME = 48
    PACK_SIZE = 49
    REPLICA_TENSOR = 56
    REPLICA_DIGEST = 57
