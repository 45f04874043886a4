from __future__ import annotations

import asyncio
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_storage import pack
from vescale_storage.backends import open_backend
from vescale_storage.digest import digest
from vescale_storage.errors import CorruptionError, FormatError
from vescale_storage.keys import pack_key

CHUNKS = st.lists(st.binary(max_size=50), min_size=1, max_size=20)


def build(chunks):
    builder = pack.PackBuilder()
    for chunk in chunks:
        builder.add(digest(chunk), [chunk[:3], chunk[3:]], pack.Codec.RAW)
    return builder.finish()


@given(CHUNKS)
def test_every_chunk_lies_where_the_footer_says(chunks):
    made = build(chunks)
    data = b"".join(bytes(part) for part in made.payload)
    entries = pack.decode_footer(bytes(made.payload[-1]), object_size_bytes=len(data), name=made.name_hex)
    found = {digest(data[e.offset : e.offset + e.length]): e for e in entries}
    assert list(found) == [e.digest for e in entries]
    assert found.keys() == {digest(chunk) for chunk in chunks}


@settings(deadline=None, max_examples=50)
@given(CHUNKS, st.data())
def test_a_pack_read_from_storage_is_whole_or_corrupt(chunks, data):
    made = build(chunks)
    content = b"".join(bytes(part) for part in made.payload)
    start = len(content) - pack.footer_bytes(len(made.entries))
    position = data.draw(st.integers(start, len(content) - 1))
    bits = data.draw(st.integers(1, 255))
    damaged = bytearray(content)
    damaged[position] ^= bits

    async def main():
        backend = open_backend(f"memory://{uuid.uuid4().hex}")
        await backend.put(pack_key(made.name_hex), [bytes(damaged)])
        with pytest.raises(CorruptionError):
            await pack.read_footer(backend, made.name_hex, len(content))
        assert await pack.put_pack(backend, made) is True
        assert await pack.read_footer(backend, made.name_hex, len(content)) == made.entries

    asyncio.run(main())


@given(st.binary(max_size=200), st.integers(0, 1000))
def test_any_bytes_are_refused_as_a_footer(data, size):
    for tail in (data, data + b"VSPACK\x1a\n"):
        with pytest.raises(FormatError):
            pack.decode_footer(tail, object_size_bytes=size, name="0" * 64)
