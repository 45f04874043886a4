import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_storage.payload import MAX_BUFFERS, cut, cut_exactly, payload_bytes

payloads = st.lists(st.one_of(st.binary(max_size=40), st.binary(max_size=40).map(bytearray)), max_size=12)


def joined(batches):
    return b"".join(bytes(view) for batch in batches for view in batch)


@given(payloads, st.integers(1, 50), st.integers(1, 5))
def test_cut_keeps_every_byte_in_order_and_its_limits(payload, batch_bytes, max_buffers):
    batches = list(cut(payload, batch_bytes, max_buffers=max_buffers))
    assert joined(batches) == b"".join(payload)
    for batch in batches:
        assert 1 <= len(batch) <= max_buffers
        assert all(len(view) for view in batch)
        assert payload_bytes(batch) <= batch_bytes


@given(payloads, st.integers(1, 50))
def test_cut_exactly_fills_every_part_but_the_last(payload, part_bytes):
    parts = list(cut_exactly(payload, part_bytes))
    assert joined(parts) == b"".join(payload)
    assert [payload_bytes(part) for part in parts[:-1]] == [part_bytes] * (len(parts) - 1)
    assert len(parts) == -(-payload_bytes(payload) // part_bytes)


def test_payload_bytes():
    assert payload_bytes([]) == 0
    assert payload_bytes([b"ab", bytearray(3), memoryview(b"cde")[1:]]) == 7


def test_views_share_the_callers_memory():
    buffer = bytearray(b"abcdef")
    first, second = cut([buffer], 3)
    buffer[4] = ord("X")
    assert bytes(second[0]) == b"dXf"
    assert bytes(first[0]) == b"abc"


@pytest.mark.parametrize("num_buffers", [MAX_BUFFERS, MAX_BUFFERS + 1])
def test_the_kernels_limit_on_buffers_is_the_default(num_buffers):
    assert [len(batch) for batch in cut([b"x"] * num_buffers, 10**6)] == [MAX_BUFFERS, 1][
        : num_buffers - MAX_BUFFERS + 1
    ]
