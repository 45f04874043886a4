"""The section on collection of FORMAT.md against the code."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

from vescale_ckpt.collecting.repack import rewriting_of
from vescale_storage.collect import marks
from vescale_storage.collect.marks import Sweep, encode_sweep, mark_key, new_mark_name
from vescale_storage.digest import hexdigest

DOCUMENT = (Path(__file__).parents[3] / "storage" / "FORMAT.md").read_text(encoding="utf-8")
SECTION = DOCUMENT.split("\n## Collection\n")[1].split("\n## ")[0]
WORDS = " ".join(SECTION.split())


def rows(marker: str) -> list[list[str]]:
    lines = SECTION.split(f"<!-- {marker} -->\n")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_header_of_a_mark():
    formats, end = "<", 0
    for offset, size, kind, _ in rows("struct: mark header"):
        assert int(offset) == end
        end += int(size)
        formats += f"{size}s" if kind == "bytes" else {"2": "H", "4": "I", "8": "Q"}[size]
    assert formats == marks._HEADER.format
    assert struct.calcsize(formats) == marks.MARK_HEADER_BYTES
    fields = [row[3] for row in rows("struct: mark header")]
    assert fields[0] == f"magic: `{marks.MARK_MAGIC.hex(' ')}`"
    assert fields[1] == f"version: {marks.MARK_VERSION}"


def test_the_fields_of_a_sweep_record():
    written = json.loads(encode_sweep(Sweep(new_mark_name(1.0), 1.0, 2.0, "0" * marks.OWNER_DIGITS)))
    assert [row[0].strip("`") for row in rows("record: sweep")] == list(written)[3:]
    assert f"| `owner` | {marks.OWNER_DIGITS} hex |" in SECTION


def test_keys_and_numbers():
    assert re.fullmatch(r"gc/mark-[0-9]{16}-[0-9a-f]{16}", mark_key(new_mark_name(1767225600.5)))
    assert f"at most {marks.MAX_MARK_NAMES} names" in WORDS
    assert marks.LATE_PART == 1 / 4
    assert "at most a quarter of the grace period after *created*" in WORDS
    assert marks.SAVE_PART == 1 / 2
    assert "half of the mark's grace period or more has passed" in WORDS
    assert marks.DEFAULT_GRACE_SECONDS == 24 * 3600
    assert "The default is 24 hours" in WORDS
    assert Sweep("", 10.0, 5.0, "").is_over(20.0)
    assert "twice `grace` after `begun`" in WORDS


def test_the_transaction_of_a_rewritten_snapshot():
    assert rewriting_of("ab" * 32) == hexdigest(b"repack " + b"ab" * 32)[:32]
    assert "the first 32 hex digits of the digest of `repack <manifest of the old ref>`" in WORDS
