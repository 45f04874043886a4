"""Targets at fsspec URLs: streamed, gone on with file by file, and nothing under its final name before its time."""

from __future__ import annotations

import uuid

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from vescale_ckpt.errors import StorageError
from vescale_ckpt.interop.convert import convert
from vescale_ckpt.interop.convert.remote_target import RemoteTarget
from vescale_ckpt.interop.foreign.detect import open_foreign

STATE = {f"t{i}": torch.arange(100.0 * (i + 1)) for i in range(5)}


class StopError(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def url():
    return f"memory://remote-{uuid.uuid4().hex}/out"


@pytest.fixture
def source(tmp_path):
    save_file(STATE, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def stop_after(num_bytes: int):
    left = [num_bytes]

    def advance(count: int) -> None:
        left[0] -= count
        if left[0] < 0:
            raise StopError

    return advance


def names(url: str) -> list[str]:
    memory = fsspec.filesystem("memory")
    root = url.removeprefix("memory:/")
    return sorted(path.removeprefix(f"{root}/") for path in memory.find(root))


def test_an_interrupted_conversion_goes_on_with_the_file_it_was_at(source, url):
    with pytest.raises(StopError):
        convert(source, url, max_shard_bytes=1000, progress=stop_after(2500))
    assert all(name.startswith(".vescale-convert") for name in names(url))
    report = convert(source, url, max_shard_bytes=1000)
    assert report.bytes_resumed > 400
    assert not any(name.startswith(".vescale") for name in names(url))
    with open_foreign(url) as found:
        assert all(torch.equal(found.read(name), tensor) for name, tensor in STATE.items())


def test_resume_false_and_another_plan_begin_anew(source, url):
    for options in ({"resume": False}, {"max_shard_bytes": 1500}):
        with pytest.raises(StopError):
            convert(source, url, max_shard_bytes=1000, progress=stop_after(2500))
        report = convert(source, f"{url}", **{"max_shard_bytes": 1000, **options})
        assert report.bytes_resumed == 0
        fsspec.filesystem("memory").rm(url.removeprefix("memory:/"), recursive=True)


def test_what_the_file_system_raises_is_an_error_of_ours(source, url, monkeypatch):
    target = RemoteTarget(url, None, is_file=False)

    def fail(*_, **__):
        raise OSError("no such disk")

    monkeypatch.setattr(type(target._fs), "open", fail)
    with pytest.raises(StorageError, match="no such disk"):
        convert(source, url)
    assert all(name.startswith(".vescale-convert") for name in names(url))
