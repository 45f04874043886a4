from __future__ import annotations

import uuid

import pytest

from vescale_ckpt.errors import CorruptionError, ObjectNotFoundError
from vescale_ckpt.execute.whole_pack import damaged_entries, read_whole_pack
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.digest import digest
from vescale_storage.keys import pack_key
from vescale_storage.pack import Codec, PackBuilder, encode_chunk, put_pack


@pytest.fixture
def stored():
    backend, builder = MemoryBackend(uuid.uuid4().hex), PackBuilder()
    builder.add(digest(b"a" * 100), [b"a" * 100], Codec.RAW)
    codec, body = encode_chunk(bytes(1000), Codec.ZSTD, 4)
    builder.add(digest(bytes(1000)), [body], codec)
    pack = builder.finish()
    loop.run(put_pack(backend, pack))
    return backend, pack


def test_all_of_it(stored):
    backend, pack = stored
    whole = loop.run(read_whole_pack(backend, pack.name_hex, pack.size_bytes))
    assert whole.entries == pack.entries
    assert damaged_entries(whole.body, whole.entries) == []


@pytest.mark.parametrize(("at", "which"), [(5, 0), (110, 1)])
def test_damaged_chunks_are_named(stored, at, which):
    backend, pack = stored
    whole = loop.run(read_whole_pack(backend, pack.name_hex, pack.size_bytes))
    whole.body[at] ^= 0x10
    assert damaged_entries(whole.body, whole.entries) == [pack.entries[which]]


def test_footers_are_proven(stored):
    backend, pack = stored
    key = pack_key(pack.name_hex)
    body = bytearray(loop.run(backend.get(key)))
    body[-30] ^= 1
    loop.run(backend.put(key, [bytes(body)]))
    with pytest.raises(CorruptionError):
        loop.run(read_whole_pack(backend, pack.name_hex, pack.size_bytes))
    loop.run(backend.delete(key))
    with pytest.raises(ObjectNotFoundError):
        loop.run(read_whole_pack(backend, pack.name_hex, pack.size_bytes))
