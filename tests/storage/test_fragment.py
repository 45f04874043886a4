from __future__ import annotations

import struct

import pytest

from vescale_storage import fragment
from vescale_storage.digest import digest
from vescale_storage.errors import ConfigError, CorruptionError, FormatError, UnsupportedVersionError
from vescale_storage.fragment import AbortRecord, decode_abort, decode_fragment, encode_abort, encode_fragment
from vescale_storage.sealed import MAX_RECORD_BYTES, seal

TXN, OTHER = "0123456789abcdef" * 2, "f" * 32


def joined(payload) -> bytes:
    return b"".join(bytes(part) for part in payload)


def every_damage(data: bytes):
    for position in range(len(data)):
        for bits in (1, 32, 128, 255):
            yield data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :]
    yield from (data[:length] for length in range(len(data)))
    yield from (data[length:] for length in range(1, len(data)))
    yield from (data + b"\x00", b"\x00" + data, data + data)


@pytest.mark.parametrize("content", [b"", b"x", b"content" * 1000])
def test_a_fragment_comes_back(content):
    for form in (content, bytearray(content), memoryview(content)):
        payload = encode_fragment(TXN, 7, form)
        assert payload[1] is form
        data = joined(payload)
        assert decode_fragment(data, TXN, 7) == content
        assert decode_fragment(bytearray(data), TXN, 7) == content


def test_layout():
    data = joined(encode_fragment(TXN, 7, b"content"))
    assert data[:8] == b"VSFRAG\x1a\n"
    assert struct.unpack("<HHI", data[8:16]) == (1, 0, 7)
    assert data[16:32] == bytes.fromhex(TXN)
    assert data[32:-32] == b"content"
    assert data[-32:] == digest(data[:-32])
    assert fragment.FRAGMENT_HEADER_BYTES == 32


def test_every_flipped_byte_every_cut_and_every_addition_is_corruption_that_names_the_key():
    for bad in every_damage(joined(encode_fragment(TXN, 7, b"some content"))):
        with pytest.raises(CorruptionError, match=f"txn/{TXN}/rank-7"):
            decode_fragment(bad, TXN, 7)


def test_a_fragment_of_another_rank_or_transaction_is_corruption():
    data = joined(encode_fragment(TXN, 7, b"content"))
    for transaction, rank in ((TXN, 8), (OTHER, 7)):
        with pytest.raises(CorruptionError):
            decode_fragment(data, transaction, rank)


@pytest.mark.parametrize(("version", "flags"), [(2, 0), (0, 0), (1, 1)])
def test_a_newer_fragment_is_told_apart_from_damage(version, flags):
    body = struct.pack("<8sHHI16s", b"VSFRAG\x1a\n", version, flags, 7, bytes.fromhex(TXN)) + b"content"
    with pytest.raises(UnsupportedVersionError, match="same version of vescale-ckpt on all ranks"):
        decode_fragment(body + digest(body), TXN, 7)
    body = b"NOTFRAG!" + body[8:]
    with pytest.raises(CorruptionError):
        decode_fragment(body + digest(body), TXN, 7)


def test_what_no_reader_would_accept_is_not_written(monkeypatch):
    for transaction, rank in (("x", 0), (TXN, -1), (TXN, 10**7)):
        with pytest.raises(ConfigError):
            encode_fragment(transaction, rank, b"")
        with pytest.raises(ConfigError):
            encode_abort(AbortRecord(transaction, rank, "kind", "message"))
    monkeypatch.setattr(fragment, "MAX_FRAGMENT_BYTES", 100)
    encode_fragment(TXN, 0, b"x" * 36)
    with pytest.raises(ConfigError, match="101 bytes"):
        encode_fragment(TXN, 0, b"x" * 37)


# ---- abort records

RECORD = AbortRecord(TXN, 3, "no_space", "disk full on node ☃\nsecond line", {1: "broken", 4095: "silent"})


def test_an_abort_record_comes_back():
    assert decode_abort(encode_abort(RECORD), TXN, 3) == RECORD
    plain = AbortRecord(TXN, 3, "", "")
    assert decode_abort(encode_abort(plain), TXN, 3) == plain


def test_damaged_and_misplaced_abort_records_are_corruption():
    data = encode_abort(RECORD)
    for bad in every_damage(data):
        with pytest.raises(CorruptionError, match=f"txn/{TXN}/abort-3"):
            decode_abort(bad, TXN, 3)
    for transaction, rank in ((TXN, 4), (OTHER, 3)):
        with pytest.raises(CorruptionError):
            decode_abort(data, transaction, rank)


@pytest.mark.parametrize("letter", ["x", "☃", "🚀", "\x00", '"', "\udcff", "\n"])
def test_texts_of_any_length_and_content_fit_a_record(letter):
    record = AbortRecord(TXN, 3, letter * 9999, letter * 99_999, dict.fromkeys(range(5000), letter * 9999))
    data = encode_abort(record)
    assert len(data) < MAX_RECORD_BYTES
    found = decode_abort(data, TXN, 3)
    assert found.message.endswith(" ...")
    assert len(found.failures) == fragment.MAX_FAILURES
    assert found.kind.startswith("?" if letter == "\udcff" else letter)


def test_long_texts_keep_as_much_as_fits():
    found = decode_abort(encode_abort(AbortRecord(TXN, 3, "kind", "x" * 5000)), TXN, 3)
    assert len(found.message) == fragment.MAX_MESSAGE_CHARS
    exact = AbortRecord(TXN, 3, "kind", "x" * fragment.MAX_MESSAGE_CHARS)
    assert decode_abort(encode_abort(exact), TXN, 3) == exact


@pytest.mark.parametrize(
    "change",
    [
        {"message": "x" * 4001},
        {"message": None},
        {"error": "x" * 101},
        {"error": 5},
        {"failures": []},
        {"failures": {"x": "y"}},
        {"failures": {"-1": "y"}},
        {"failures": {"9" * 30: "y"}},
        {"failures": {"²": "y"}},
        {"failures": {"1": "y" * 401}},
        {"failures": {str(rank): "y" for rank in range(65)}},
    ],
    ids=lambda change: ascii(change)[:40],
)
def test_records_that_no_writer_makes_are_format_errors(change):
    fields = {"transaction": TXN, "rank": 3, "error": "kind", "message": "text", "failures": {}}
    assert decode_abort(seal("abort", {**fields, "more": 1}), TXN, 3).message == "text"
    with pytest.raises(FormatError):
        decode_abort(seal("abort", {**fields, **change}), TXN, 3)
