from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_storage.codec import Codec, decode_chunk, encode_chunk
from vescale_storage.errors import CorruptionError

# Repeats, so that some inputs shrink and some do not.
DATA = st.builds(
    lambda unit, times, rest: unit * times + rest, st.binary(max_size=40), st.integers(0, 200), st.binary()
)


@given(DATA, st.integers(1, 255))
def test_decode_undoes_encode(raw, item_bytes):
    codec, stored = encode_chunk(raw, Codec.ZSTD, item_bytes)
    assert decode_chunk(stored, codec, len(raw)) == raw
    assert len(stored) <= len(raw)
    assert codec is Codec.ZSTD or stored is raw


@given(st.binary(max_size=300), st.integers(0, 10_000))
def test_any_bytes_decode_to_the_asked_length_or_are_corrupt(stored, raw_length):
    with contextlib.suppress(CorruptionError):
        assert len(decode_chunk(stored, Codec.ZSTD, raw_length)) == raw_length


@settings(deadline=None, max_examples=30)
@given(st.binary(min_size=1, max_size=20), st.sampled_from([1, 2, 4, 8]))
def test_a_damaged_encoding_gives_the_asked_length_or_is_corrupt(unit, item_bytes):
    raw = unit * 100
    codec, stored = encode_chunk(raw, Codec.ZSTD, item_bytes)
    for position in range(len(stored)):
        for bits in (0x01, 0x80, 0xFF):
            damaged = bytearray(stored)
            damaged[position] ^= bits
            with contextlib.suppress(CorruptionError):
                assert len(decode_chunk(damaged, codec, len(raw))) == len(raw)  # then the digest decides
    for length in range(len(stored)):
        with pytest.raises(CorruptionError):
            decode_chunk(stored[:length], codec, len(raw))
