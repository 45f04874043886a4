import errno
import fcntl
import logging
import multiprocessing
import os
import random
import signal
import time

import pytest

from vescale_storage.errors import ConfigError
from vescale_storage.wrappers import cache_folder
from vescale_storage.wrappers.cache_folder import CacheFolder

BLOCK = 4096
CONTENT = random.Random(1).randbytes(10 * BLOCK)


@pytest.fixture
def folder(tmp_path):
    return CacheFolder(tmp_path / "cache", 64 * 2 * BLOCK, block_bytes=BLOCK)


def write(folder, start, stop, name="object", **end):
    folder.write(name, start, memoryview(CONTENT)[start:stop], **end)


def read(folder, start, stop, name="object"):
    """Return what is missing; what is not has been compared."""
    out = bytearray(b"\xee" * (stop - start))
    missing = folder.read(name, start, memoryview(out))
    low, high = missing or (stop, stop)
    assert out[: low - start] == CONTENT[start:low]
    assert out[high - start :] == CONTENT[high:stop]
    return missing


def files(folder):
    return sorted(path.name for path in folder.folder.glob("v1/objects/*/*/*"))


def test_what_was_written_is_read_and_nothing_else(folder):
    assert read(folder, 0, 100) == (0, 100)
    write(folder, 1000, 2000)
    assert read(folder, 1000, 2000) is None
    assert read(folder, 1200, 1300) is None
    assert read(folder, 900, 1100) == (900, 1000)
    assert read(folder, 1900, 2200) == (2000, 2200)
    assert read(folder, 500, 3000) == (500, 3000)
    assert read(folder, 1000, 2000, "another") == (1000, 2000)


def test_ranges_are_cut_at_a_grid_and_joined_again(folder):
    write(folder, 100, 3 * BLOCK + 50)
    assert files(folder) == ["100-4096", "12288-12338", "4096-8192", "8192-12288"]
    assert read(folder, 100, 3 * BLOCK + 50) is None
    assert read(folder, BLOCK - 10, 2 * BLOCK + 10) is None
    assert read(folder, 0, 3 * BLOCK) == (0, 100)


def test_overlapping_ranges_complete_each_other(folder):
    for start, stop in ((0, 3000), (1000, 3500), (5000, 6000), (2000, 2500)):
        write(folder, start, stop)
    assert read(folder, 500, 3400) is None
    assert read(folder, 500, 6000) == (3500, 5000)
    assert "2000-2500" not in files(folder), "what is held already is not written again"


@pytest.mark.parametrize("seed", range(20))
def test_any_ranges_in_any_order_give_the_bytes_that_were_written(folder, seed):
    chance = random.Random(seed)
    held = bytearray(len(CONTENT))
    for _ in range(12):
        start = chance.randrange(len(CONTENT))
        stop = chance.randrange(start, len(CONTENT)) + 1
        missing = read(folder, start, stop)
        if missing is None:
            assert all(held[start:stop])
        else:
            assert not held[missing[0]]
            assert not held[missing[1] - 1]
            write(folder, *missing)
            held[missing[0] : missing[1]] = b"\x01" * (missing[1] - missing[0])


def test_whole_objects_need_their_end(folder):
    size = 3 * BLOCK + 5
    write(folder, 0, size)
    assert folder.read_whole("object") is None
    write(folder, 0, size, is_end=True)
    assert folder.read_whole("object") == CONTENT[:size]
    next(path for path in folder.folder.glob("v1/objects/*/*/*") if path.name.startswith("4096-")).unlink()
    assert folder.read_whole("object") is None
    assert read(folder, 0, size) == (BLOCK, 2 * BLOCK)


# Damage


def only_file(folder):
    (path,) = folder.folder.glob("v1/objects/*/*/*")
    return path


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path, 0),
        lambda path: flip(path, 20),
        lambda path: flip(path, 60),
        lambda path: flip(path, -1),
        lambda path: os.truncate(path, 200),
        lambda path: os.truncate(path, 0),
        lambda path: path.rename(path.with_name("1001-2001")),
        lambda path: path.rename(path.with_name("1000-1900")),
    ],
)
def test_a_damaged_file_is_dropped_and_read_again(folder, damage, caplog):
    write(folder, 1000, 2000)
    damage(only_file(folder))
    assert read(folder, 1001, 1900) == (1001, 1900)
    assert files(folder) == []
    assert folder.num_damaged == 1
    assert "damaged file" in caplog.text
    write(folder, 1000, 2000)
    assert read(folder, 1000, 2000) is None


def test_a_file_of_another_object_is_not_taken_for_this_one(folder):
    write(folder, 1000, 2000, "one")
    path = only_file(folder)
    write(folder, 1000, 2000, "other")
    (other,) = (found for found in folder.folder.glob("v1/objects/*/*/*") if found != path)
    other.write_bytes(path.read_bytes())
    assert read(folder, 1000, 2000, "other") == (1000, 2000)
    assert read(folder, 1000, 2000, "one") is None


def test_names_that_lie_cost_no_memory(folder):
    write(folder, 0, 100, is_end=True)
    path = only_file(folder)
    path.rename(path.with_name(f"{2**60}-{2**60 + 100}.end"))
    for name in ("5-3", "0-99999999999", "x", "01-2", "-1-5"):
        path.with_name(name).write_bytes(b"x")
    assert folder.read_whole("object") is None
    assert read(folder, 0, 100) == (0, 100)


# The limit


def test_the_least_used_go_first(tmp_path):
    folder = CacheFolder(tmp_path, 8 * 2 * BLOCK, block_bytes=BLOCK)  # a block and its header take two pages
    for number in range(8):
        write(folder, 0, BLOCK, f"object-{number}")
        time.sleep(0.002)
    assert folder.used_bytes() == folder.limit_bytes
    assert read(folder, 0, BLOCK, "object-0") is None  # used, so it stays
    time.sleep(0.002)
    write(folder, 0, BLOCK, "object-8")
    held = {number for number in range(9) if read(folder, 0, BLOCK, f"object-{number}") is None}
    assert held == {0, 3, 4, 5, 6, 7, 8}  # an eighth of the limit is free again
    assert len(list(folder.folder.glob("v1/objects/*/*"))) == 7, "emptied folders are gone"


def test_never_more_than_the_limit(folder):
    for number in range(40):
        write(folder, 0, 3 * BLOCK + 1, f"object-{number}")
        assert folder.used_bytes() <= folder.limit_bytes
    assert folder.used_bytes() > folder.limit_bytes // 2


def test_what_others_hold_and_what_is_forgotten_counts(folder):
    other = CacheFolder(folder.folder, folder.limit_bytes, block_bytes=BLOCK)
    for number in range(100):
        (folder if number % 2 else other).write(f"object-{number}", 0, memoryview(CONTENT)[:BLOCK])
        assert folder.used_bytes() <= folder.limit_bytes
    for number in range(100):
        folder.forget(f"object-{number}")
    assert folder.used_bytes() == 0
    assert (folder.folder / "v1" / "usage").read_bytes() == b"0" * 20


@pytest.mark.parametrize("nonsense", [b"", b"12", b"x" * 20, b"9" * 40, b"-1" + b"0" * 18])
def test_a_count_that_is_nonsense_is_made_anew(folder, nonsense):
    for number in range(60):
        write(folder, 0, BLOCK, f"object-{number}")
    (folder.folder / "v1" / "usage").write_bytes(nonsense)
    for number in range(60, 80):
        write(folder, 0, BLOCK, f"object-{number}")
    assert folder.used_bytes() <= folder.limit_bytes
    assert read(folder, 0, BLOCK, "object-79") is None


def test_files_that_a_died_process_was_writing_are_removed(folder):
    write(folder, 0, BLOCK)
    old, new = (folder.folder / "v1" / "temp" / name for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    folder._evict(0)
    assert (old.exists(), new.exists()) == (False, True)
    assert files(folder) == []


@pytest.mark.parametrize(("limit", "block"), [(0, BLOCK), (3 * BLOCK, BLOCK), (2**40, 0), (2**40, 2**30)])
def test_a_limit_too_small_is_refused(tmp_path, limit, block):
    with pytest.raises(ConfigError, match="at least"):
        CacheFolder(tmp_path, limit, block_bytes=block)


# A disk that does not take it


def failing(code):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_full_or_broken_disk_ends_writing_with_one_warning(folder, monkeypatch, caplog, code):
    write(folder, 0, BLOCK, "before")
    monkeypatch.setattr(os, "writev", failing(code))
    for number in range(5):
        write(folder, 0, BLOCK, f"object-{number}")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert os.strerror(code) in caplog.text
    assert list((folder.folder / "v1" / "temp").iterdir()) == []
    monkeypatch.undo()
    write(folder, 0, BLOCK, "after")
    assert read(folder, 0, BLOCK, "after") == (0, BLOCK)
    assert read(folder, 0, BLOCK, "before") is None, "what is there is still used"


def test_a_place_that_is_no_folder(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"x")
    folder = CacheFolder(tmp_path / "file", 2**20, block_bytes=BLOCK)
    for _ in range(3):
        assert read(folder, 0, 100) == (0, 100)
        write(folder, 0, 100)
        folder.forget("object")
    assert len(caplog.records) == 2  # reading, writing


def test_files_that_cannot_be_read_are_missing(folder, monkeypatch, caplog):
    write(folder, 0, BLOCK)
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    for _ in range(3):
        assert read(folder, 0, BLOCK) == (0, BLOCK)
    assert len(caplog.records) == 1


def test_short_writes_are_continued(folder, monkeypatch):
    writev, plain = os.writev, os.write
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [views[0], views[1][:5]]))
    monkeypatch.setattr(os, "write", lambda fd, data: plain(fd, data[:100]))
    write(folder, 0, BLOCK)
    monkeypatch.undo()
    assert read(folder, 0, BLOCK) is None


def test_a_lock_that_another_holds_costs_only_the_cache(folder, monkeypatch):
    monkeypatch.setattr(cache_folder, "_LOCK_SECONDS", 0.02)
    write(folder, 0, BLOCK)
    descriptor = os.open(folder.folder / "v1" / "usage", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    write(folder, BLOCK, 2 * BLOCK)
    folder.forget("nothing")
    assert read(folder, 0, 2 * BLOCK) == (BLOCK, 2 * BLOCK)
    os.close(descriptor)
    write(folder, BLOCK, 2 * BLOCK)
    assert read(folder, 0, 2 * BLOCK) is None


def test_an_emptied_folder_that_goes_while_a_file_appears(folder, monkeypatch):
    write(folder, 0, BLOCK)
    rename = type(folder.folder).rename
    gone = []

    def vanish(path, target):
        if not gone:
            gone.append(target)
            target.parent.rmdir()
        return rename(path, target)

    folder.forget("object")
    monkeypatch.setattr(type(folder.folder), "rename", vanish)
    write(folder, 0, BLOCK)
    assert gone
    assert read(folder, 0, BLOCK) is None


# Processes


def hammer(path, seed, seconds, report):
    """Read and write random ranges of many objects; any wrong byte ends the process with an error."""
    chance = random.Random(seed)
    folder = CacheFolder(path, 40 * 2 * BLOCK, block_bytes=BLOCK)
    report.put("ready")
    end = time.monotonic() + seconds
    num_hits = 0
    while time.monotonic() < end:
        number = chance.randrange(30)
        start = chance.randrange(len(CONTENT) - 1)
        stop = min(len(CONTENT), start + chance.randrange(1, 3 * BLOCK))
        content = bytes([number]) + CONTENT[1:]
        out = bytearray(stop - start)
        missing = folder.read(f"object-{number}", start, memoryview(out))
        low, high = missing or (stop, stop)
        assert out[: low - start] == content[start:low]
        assert out[high - start :] == content[high:stop]
        num_hits += missing is None
        if missing is not None:
            folder.write(f"object-{number}", low, memoryview(content)[low:high])
        elif chance.random() < 0.01:
            folder.forget(f"object-{number}")
    assert folder.num_damaged == 0
    report.put(num_hits)


@pytest.mark.parametrize("killed", [False, True])
def test_processes_that_share_a_folder(tmp_path, killed):
    context = multiprocessing.get_context("spawn")
    report = context.Queue()
    workers = [context.Process(target=hammer, args=(tmp_path, seed, 1.5, report)) for seed in range(4)]
    for worker in workers:
        worker.start()
    assert [report.get(timeout=60) for _ in workers] == ["ready"] * 4
    if killed:
        time.sleep(0.5)
        for worker in workers[:2]:
            os.kill(worker.pid, signal.SIGKILL)
    for worker in workers:
        worker.join(60)
    codes = [worker.exitcode for worker in workers]
    assert codes == ([-signal.SIGKILL] * 2 + [0] * 2 if killed else [0] * 4)
    assert sum(report.get(timeout=10) for _ in range(2 if killed else 4)) > 0
    folder = CacheFolder(tmp_path, 40 * 2 * BLOCK, block_bytes=BLOCK)
    in_flight = 4 * 2 * BLOCK
    assert folder.used_bytes() <= folder.limit_bytes + in_flight
    write(folder, 0, BLOCK)
    assert read(folder, 0, BLOCK) is None, "no dead process keeps the lock"
