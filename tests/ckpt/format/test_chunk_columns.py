from __future__ import annotations

import numpy as np
import pytest

from vescale_ckpt.errors import CorruptionError, FormatError, InternalError
from vescale_ckpt.format.chunk_columns import (
    CHUNK_COLUMNS,
    PARTIAL_COLUMNS,
    check_columns,
    decode_columns,
    encode_columns,
)
from vescale_ckpt.format.document import Section, decode_document, encode_document
from vescale_ckpt.format.kinds import Kind

MAGIC = b"\x89TEST\r\n\0"


def document(sections):
    data = encode_document(MAGIC, (1, 0), sections)
    return decode_document(data, magic=MAGIC, version=(1, 0), what="thing", known=frozenset(Kind))


def test_there_and_back(manifest):
    columns = decode_columns(document(encode_columns(manifest.chunks)))
    assert set(columns) == set(CHUNK_COLUMNS) | set(PARTIAL_COLUMNS)
    for name, column in columns.items():
        assert np.array_equal(column, getattr(manifest.chunks, name))
        assert column.dtype == getattr(manifest.chunks, name).dtype
        assert not column.flags.writeable


def test_a_whole_tile_takes_53_bytes(manifest):
    sections = {section.kind: section.payload for section in encode_columns(manifest.chunks)}
    per_chunk = [sections[kind] for kind, _, _ in CHUNK_COLUMNS.values()]
    assert sum(column.nbytes for column in per_chunk) == 53 * len(manifest.chunks)


@pytest.mark.parametrize("name", list(CHUNK_COLUMNS))
def test_columns_of_different_lengths_are_refused(manifest, name):
    sections = encode_columns(manifest.chunks)
    kind = CHUNK_COLUMNS[name][0]
    short = [Section(s.kind, s.payload[:-1]) if s.kind == kind else s for s in sections]
    with pytest.raises(CorruptionError, match=f"'{name}': 10"):
        decode_columns(document(short))
    with pytest.raises(FormatError, match=f"section {kind} is not there"):
        decode_columns(document([s for s in sections if s.kind != kind]))


def test_what_is_written_has_the_right_types(manifest):
    check_columns(manifest.chunks)

    class Wrong:
        tile = np.zeros(3, np.int32)

    with pytest.raises(InternalError, match="column tile of int32"):
        check_columns(Wrong())
