from __future__ import annotations

import pytest

from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.format.document import Section, decode_document, encode_document
from vescale_ckpt.format.packs import check_packs, decode_packs, encode_packs, pack_sizes
from vescale_ckpt.format.records import PackRecord

A, B = PackRecord("ab" * 32, 100), PackRecord("01" * 32, 2**40)
MAGIC = b"\x89TEST\r\n\0"


def document(sections):
    data = encode_document(MAGIC, (1, 0), sections)
    return decode_document(data, magic=MAGIC, version=(1, 0), what="thing", known=frozenset({1, 2}))


@pytest.mark.parametrize("packs", [(), (A,), (A, B)])
def test_there_and_back(packs):
    check_packs(packs, "thing")
    assert decode_packs(document(encode_packs(packs, 1, 2)), 1, 2) == packs


def test_the_bytes():
    names, sizes = encode_packs((A, B), 1, 2)
    assert names.payload == bytes.fromhex(A.name + B.name)
    assert pack_sizes((A, B)).tolist() == [100, 2**40]
    assert sizes.payload.astype("<u8").tobytes().hex() == "6400000000000000" + "0000000000010000"


@pytest.mark.parametrize(
    "packs",
    [
        (PackRecord("ab" * 31, 1),),
        (PackRecord("AB" * 32, 1),),
        (PackRecord("ab" * 32 + "\n", 1),),
        (PackRecord("", 0),),
        (PackRecord("ab" * 32, 0),),
        (PackRecord("ab" * 32, 2**63),),
        (A, B, A),
    ],
)
def test_what_is_no_table_is_refused(packs):
    with pytest.raises(CorruptionError, match=f"pack {len(packs) - 1} is"):
        check_packs(packs, "thing")


def test_sections_that_do_not_fit_are_refused():
    name, size = encode_packs((A, B), 1, 2)
    with pytest.raises(CorruptionError, match="names 1 packs and sizes 2"):
        decode_packs(document([Section(1, name.payload[:32]), size]), 1, 2)
    with pytest.raises(CorruptionError, match="no multiple"):
        decode_packs(document([Section(1, name.payload[:33]), size]), 1, 2)
    with pytest.raises(CorruptionError, match="comes twice"):
        decode_packs(document([Section(1, name.payload[:32] * 2), size]), 1, 2)
    with pytest.raises(FormatError, match="section 2 is not there"):
        decode_packs(document([name]), 1, 2)
