from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_storage.collect import marks
from vescale_storage.collect.marks import (
    DEFAULT_GRACE_SECONDS,
    Mark,
    Marked,
    Sweep,
    decode_mark,
    decode_sweep,
    encode_mark,
    encode_sweep,
    new_mark_name,
    parse_gc_key,
    refused,
    split_marks,
)
from vescale_storage.digest import digest
from vescale_storage.errors import ConfigError, CorruptionError, FormatError, UnsupportedVersionError

NAMES = st.frozensets(st.binary(min_size=32, max_size=32).map(bytes.hex), max_size=5)
MARK = Mark("0001767225600500-00112233445566ff", 1767225600.5, 3600.0, frozenset({"ab" * 32}), frozenset({"cd" * 32}))
SWEEP = Sweep(MARK.name, 1767229200.5, 3600.0, "0123456789abcdef")


def joined(mark: Mark) -> bytes:
    return b"".join(bytes(part) for part in encode_mark(mark))


@settings(deadline=None)
@given(st.integers(0, 10**13), st.integers(0, 10**10), NAMES, NAMES)
def test_what_is_encoded_comes_back(created, grace, packs, manifests):
    mark = Mark(new_mark_name(created / 1000), created / 1000, grace / 1000, packs, manifests)
    assert decode_mark(joined(mark), mark.key) == mark


def test_equal_marks_have_equal_bytes_whatever_the_order_of_their_names():
    names = [f"{i:064x}" for i in range(20)]
    first = Mark(MARK.name, MARK.created_seconds, 1.0, frozenset(names), frozenset())
    second = Mark(MARK.name, MARK.created_seconds, 1.0, frozenset(reversed(names)), frozenset())
    assert joined(first) == joined(second)


@pytest.mark.parametrize("at", range(0, 36 + 96, 7))
def test_every_changed_byte_is_noticed(at):
    data = bytearray(joined(MARK))
    data[at] ^= 1
    with pytest.raises(CorruptionError, match="check of this mark"):
        decode_mark(data, MARK.key)


def test_cut_and_lengthened_marks_are_refused():
    data = joined(MARK)
    for wrong in (b"", data[:-1], data[1:], data + b"\0", data[:36]):
        with pytest.raises(CorruptionError):
            decode_mark(wrong, MARK.key)


def resealed(**changes) -> bytes:
    fields = list(marks._HEADER.unpack_from(joined(MARK)))
    for place, value in changes.items():
        fields[int(place[1:])] = value
    body = marks._HEADER.pack(*fields) + joined(MARK)[36:-32]
    return body + digest(body)


def test_a_mark_under_another_key_or_with_other_counts_is_no_mark():
    other = MARK.key.replace("500-", "501-")
    with pytest.raises(CorruptionError, match="another key"):
        decode_mark(joined(MARK), other)
    with pytest.raises(CorruptionError, match="no mark"):
        decode_mark(joined(MARK), SWEEP.key)
    for change in ({"f3": 2}, {"f4": 0}, {"f0": b"VSMARK\x1a\r"}, {"f5": 0}):
        with pytest.raises(CorruptionError, match="no mark"):
            decode_mark(resealed(**change), MARK.key)


def test_a_newer_version_is_named():
    for change in ({"f1": 2}, {"f2": 1}):
        with pytest.raises(UnsupportedVersionError, match="knows version 1"):
            decode_mark(resealed(**change), MARK.key)


def test_more_names_than_a_mark_may_have_are_several_marks(monkeypatch):
    monkeypatch.setattr(marks, "MAX_MARK_NAMES", 3)
    packs, manifests = [f"{i:064x}" for i in range(5)], [f"{i:064x}" for i in range(5, 7)]
    made = split_marks(packs, manifests, now=5.0, grace_seconds=1.0)
    assert [len(mark.packs) + len(mark.manifests) for mark in made] == [3, 3, 1]
    assert frozenset().union(*(mark.packs for mark in made)) == frozenset(packs)
    assert frozenset().union(*(mark.manifests for mark in made)) == frozenset(manifests)
    assert len({mark.name for mark in made}) == 3
    assert split_marks([], [], now=5.0, grace_seconds=1.0) == []
    with pytest.raises(ConfigError, match="at most 3"):
        encode_mark(Mark(MARK.name, 1.0, 1.0, frozenset(packs), frozenset()))


def test_times_that_are_none_are_refused():
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError):
            new_mark_name(seconds)


def test_keys():
    assert parse_gc_key(MARK.key) == ("mark", MARK.name)
    assert parse_gc_key(SWEEP.key) == ("sweep", MARK.name)
    assert parse_gc_key(marks.clock_key()).kind == "clock"
    for strange in ("gc/", "gc/mark-", "gc/mark-1", f"{MARK.key}0", MARK.key.upper(), "gc/clock-x", "refs/a"):
        with pytest.raises(FormatError):
            parse_gc_key(strange)


def test_sweep_records():
    data = encode_sweep(SWEEP)
    assert decode_sweep(data, SWEEP.key) == SWEEP
    assert list(json.loads(data)) == ["check", "kind", "format", "mark", "begun", "grace", "owner"]
    with pytest.raises(CorruptionError):
        decode_sweep(data, SWEEP.key.replace("500-", "501-"))


def test_a_mark_stays_twice_its_grace_period_after_somebody_began_to_act_on_it():
    assert not SWEEP.is_over(SWEEP.begun_seconds + 7199.9)
    assert SWEEP.is_over(SWEEP.begun_seconds + 7200)


def test_a_mark_that_cannot_be_read_marks_everything():
    assert "ab" * 32 in Marked(frozenset({"ab" * 32}))
    assert "cd" * 32 not in Marked(frozenset({"ab" * 32}))
    assert "cd" * 32 in Marked(unreadable=("gc/mark-x",))


def test_a_save_may_take_half_the_grace_period():
    assert refused([MARK], ["ab" * 32, "ef" * 32], 1799) == []
    assert refused([MARK], ["ab" * 32, "ef" * 32], 1800) == ["ab" * 32]
    assert refused([], ["ab" * 32], 1e9) == []
    assert DEFAULT_GRACE_SECONDS >= 10 * 1800
