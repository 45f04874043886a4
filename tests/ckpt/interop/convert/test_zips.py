"""Planned zip archives, against Python's own reader."""

from __future__ import annotations

import io
import zipfile

from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.interop.convert.zips import ZipLayout, ZipMember


def written(layout: ZipLayout) -> bytes:
    out = bytearray()
    for part in layout.parts():
        data = part.make()
        part.seen(data)
        out += data
    return bytes(out)


def member(name: str, pieces: list[bytes]) -> ZipMember:
    return ZipMember(name, sum(map(len, pieces)), lambda: iter([lambda p=p: p for p in pieces]))


NAMES = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0/\\"), min_size=1), max_size=5, unique=True)


@given(NAMES, st.data())
def test_every_member_comes_back_and_the_size_is_known_before(names, data):
    contents = {name: data.draw(st.lists(st.binary(max_size=200), max_size=3)) for name in names}
    layout = ZipLayout([member(name, pieces) for name, pieces in contents.items()])
    raw = written(layout)
    assert len(raw) == layout.num_bytes
    assert written(layout) == raw
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == list(contents)
        assert {name: archive.read(name) for name in contents} == {n: b"".join(p) for n, p in contents.items()}


def test_bytes_begin_where_readers_that_map_like_them():
    raw = written(ZipLayout([ZipMember.of("a", b"x" * 3), ZipMember.of("b", b"y" * 64)]))
    assert raw.index(b"xxx") % 64 == 0
    assert raw.index(b"yyyy") % 64 == 0


def test_members_of_more_than_4_gib_are_announced_as_such():
    huge = ZipMember("huge", 5 << 30, lambda: iter(()))
    layout = ZipLayout([huge, ZipMember.of("small", b"abc")])
    parts = [part.make() for part in layout.parts()]
    directory = parts[-1]
    assert layout.num_bytes == sum(map(len, parts)) + (5 << 30)
    fields = directory[46 + 4 + 4 :][:16]
    assert int.from_bytes(fields[:8], "little") == 5 << 30
    assert b"PK\x06\x06" in directory


def test_many_members_are_counted_in_full():
    raw = written(ZipLayout([ZipMember.of(str(i), b"") for i in range(66_000)]))
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        assert len(archive.namelist()) == 66_000
