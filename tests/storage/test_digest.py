from __future__ import annotations

import hashlib
import os

import pytest

from vescale_storage.digest import DIGEST_BYTES, digest, digest_parts, hexdigest

# From the BLAKE3 test vectors: the input of n bytes counts 0..250 again and again.
VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
}


@pytest.mark.parametrize(("num_bytes", "expected"), VECTORS.items())
def test_known_answers(num_bytes, expected):
    data = bytes(i % 251 for i in range(num_bytes))
    assert hexdigest(data) == expected
    assert digest(data) == bytes.fromhex(expected)
    assert len(digest(data)) == DIGEST_BYTES
    assert digest(data) != hashlib.blake2s(data).digest()


def test_parts_equal_their_concatenation_and_may_be_any_buffer():
    data = os.urandom(300_000)
    parts = [data[:1], b"", bytearray(data[1:100_000]), memoryview(data)[100_000:]]
    assert digest_parts(parts) == digest(data) == digest(memoryview(bytearray(data)))
    assert digest_parts([]) == digest(b"")
