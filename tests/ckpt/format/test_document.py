from __future__ import annotations

import struct

import numpy as np
import pytest

from vescale_ckpt.errors import CorruptionError, FormatError, InternalError, UnsupportedVersionError
from vescale_ckpt.format.document import ENTRY, HEADER, Section, decode_document, encode_document

MAGIC = b"\x89TEST\r\n\0"


def decode(data, known=(1, 2, 3)):
    return decode_document(data, magic=MAGIC, version=(1, 2), what="thing", known=frozenset(known))


def encode(*sections, version=(1, 2)):
    return encode_document(MAGIC, version, sections)


def test_sections_come_back_in_place():
    column = np.arange(5, dtype=np.uint32)
    data = encode(Section(2, column), Section(1, b"abc"), Section(3, b""))
    document = decode(data)
    assert document.version == (1, 2)
    assert {kind: bytes(view) for kind, view in document.sections.items()} == {1: b"abc", 2: column.tobytes(), 3: b""}
    back = document.column(2, np.uint32)
    assert np.array_equal(back, column)
    assert not back.flags.writeable
    assert back.base is not None  # a view
    assert (
        np.frombuffer(data, np.uint8).ctypes.data
        <= back.ctypes.data
        < np.frombuffer(data, np.uint8).ctypes.data + len(data)
    )


def test_bytes_are_as_documented():
    data = encode(Section(7, b"abc", required=False), version=(1, 0))
    assert data[:24] == MAGIC + struct.pack("<HHIQ", 1, 0, 1, 24 + 24 + 8)
    assert data[24:48] == struct.pack("<HHIQQ", 7, 0, 0, 48, 3)
    assert data[48:] == b"abc\0\0\0\0\0"


def test_sections_are_aligned_and_sorted_whatever_their_order():
    sections = [Section(kind, b"x" * kind) for kind in (3, 1, 2)]
    assert encode(*sections) == encode(*reversed(sections))
    data = encode(*sections)
    for index in range(3):
        assert ENTRY.unpack_from(data, HEADER.size + ENTRY.size * index)[3] % 8 == 0


def test_columns_of_any_byte_order_and_stride_are_written_little_endian():
    wanted = np.arange(6, dtype="<u4").tobytes()
    for column in (np.arange(6, dtype=">u4"), np.arange(12, dtype=np.uint32)[::2] // 2):
        assert bytes(decode(encode(Section(1, column))).section(1)) == wanted


def test_an_empty_column_is_empty():
    document = decode(encode(Section(1, b""), Section(2, np.zeros((0, 32), np.uint8))))
    assert document.column(1, np.uint64).shape == (0,)
    assert document.column(2, np.uint8, 32).shape == (0, 32)
    assert not document.column(1, np.uint64).flags.writeable


def test_a_column_must_have_whole_items():
    document = decode(encode(Section(1, b"x" * 12)))
    assert document.column(1, np.uint32).shape == (3,)
    with pytest.raises(CorruptionError, match="12 bytes"):
        document.column(1, np.uint64)
    with pytest.raises(CorruptionError, match="no multiple of 32"):
        document.column(1, np.uint8, 32)
    with pytest.raises(FormatError, match="section 2 is not there"):
        document.column(2, np.uint8)


def test_unknown_sections_are_left_out_or_refused():
    data = encode(Section(1, b"a"), Section(9, b"new", required=False))
    assert set(decode(data).sections) == {1}
    with pytest.raises(UnsupportedVersionError, match=r"section 9.*newer vescale-ckpt"):
        decode(encode(Section(1, b"a"), Section(9, b"new")))


@pytest.mark.parametrize(("version", "found"), [((2, 0), "2.0"), ((65535, 7), "65535.7"), ((0, 9), "0.9")])
def test_another_major_version_is_refused_naming_both(version, found):
    with pytest.raises(UnsupportedVersionError) as caught:
        decode(encode(Section(1, b""), version=version))
    assert found in caught.value.message
    assert "1.x up to 1.2" in caught.value.message
    assert caught.value.context == {"found": version, "supported": (1, 2)}


def test_a_higher_major_is_told_even_if_nothing_else_is_understood():
    data = bytearray(encode(Section(1, b"abc"), version=(3, 1)))
    data[12:] = b"\xff" * 40
    with pytest.raises(UnsupportedVersionError, match=r"3\.1"):
        decode(bytes(data))


def test_a_higher_minor_is_read():
    assert decode(encode(Section(1, b"a"), version=(1, 900))).version == (1, 900)


@pytest.mark.parametrize("data", [b"", b"\x89", MAGIC, b"x" * 100, b"\x89TEST\n\0" + b"x" * 50])
def test_what_does_not_start_like_one_is_none(data):
    with pytest.raises(FormatError, match="are none"):
        decode(data)


def test_every_cut_and_every_added_byte_is_found():
    data = encode(Section(1, b"abc"), Section(2, b"d" * 16))
    for end in range(len(data)):
        with pytest.raises(FormatError):
            decode(data[:end])
    with pytest.raises(CorruptionError):
        decode(data + b"\0")


def test_every_flipped_byte_of_header_table_and_padding_is_found():
    data = encode(Section(1, b"abc"), Section(2, b"d" * 16), Section(3, b""))
    payload = set(range(96, 99)) | set(range(104, 120))
    harmless = {10, 11}  # the minor version
    for at in sorted(set(range(len(data))) - payload - harmless):
        for flip in (1, 0x80):
            damaged = bytearray(data)
            damaged[at] ^= flip
            try:
                document = decode(bytes(damaged))
            except FormatError:
                continue
            # a flag that no reader of this version asks for, of a section that it knows
            assert at in {26, 27, 50, 51, 74, 75}, at
            assert set(document.sections) == {1, 2, 3}


def test_a_table_that_promises_more_than_the_file_costs_nothing():
    data = HEADER.pack(MAGIC, 1, 0, 2**32 - 1, HEADER.size)
    with pytest.raises(CorruptionError):
        decode(data)
    data = HEADER.pack(MAGIC, 1, 0, 1, 48) + ENTRY.pack(1, 1, 0, 48, 2**63)
    with pytest.raises(CorruptionError, match="entry 0"):
        decode(data)


def test_a_section_twice_is_our_bug():
    with pytest.raises(InternalError):
        encode(Section(1, b""), Section(1, b""))
