"""A conversion that is stopped at every operation on the disk, one by one, ends equal and never shows a part."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from vescale_ckpt.interop.convert import convert, local_target
from vescale_ckpt.interop.convert.local_target import LocalTarget

if TYPE_CHECKING:
    from pathlib import Path


class StopError(BaseException):
    """Stands for the end of the process: nothing of ours catches it."""


class Stopper:
    """Lets some operations pass and stops at the next, before or after it is done."""

    def __init__(self, monkeypatch, limit: int, *, after: bool) -> None:
        self.left = limit
        self.after = after
        for name in ("put", "publish", "clean", "record"):
            self.wrap(monkeypatch, LocalTarget, name)
        for name in ("append", "finish"):
            self.wrap(monkeypatch, local_target._Growing, name)

    def wrap(self, monkeypatch, cls, name) -> None:
        inner = getattr(cls, name)

        def outer(*args, **kwargs):
            self.left -= 1
            if self.left < 0 and not self.after:
                raise StopError
            found = inner(*args, **kwargs)
            if self.left < 0:
                raise StopError
            return found

        monkeypatch.setattr(cls, name, outer)


STATE = {f"t{i}": torch.arange(40.0 + i).view(-1) for i in range(6)}


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "hf").mkdir()
    save_file(STATE, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    return tmp_path / "hf"


def shown(folder: Path) -> dict[str, bytes]:
    """What a reader sees: everything but scratch."""
    found = [path for path in folder.rglob("*") if path.is_file() and ".vescale-convert" not in str(path)]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize("after", [False, True])
def test_every_stop_is_gone_on_from(source, tmp_path, monkeypatch, after):
    whole = tmp_path / "whole"
    convert(source, whole, max_shard_bytes=400)
    expected = shown(whole)
    assert len(expected) == 5
    for limit in itertools.count():
        target = tmp_path / f"cut-{after}-{limit}"
        with monkeypatch.context() as patch:
            Stopper(patch, limit, after=after)
            try:
                convert(source, target, max_shard_bytes=400)
            except StopError:
                stopped = True
            else:
                stopped = False
        seen = shown(target)
        assert seen.items() <= expected.items(), limit
        if seen.keys() == expected.keys() and not (target / ".vescale-convert").exists():
            assert seen == expected
        else:
            convert(source, target, max_shard_bytes=400)
            assert shown(target) == expected, limit
            assert not (target / ".vescale-convert").exists()
        if not stopped:
            break
    assert limit > 15


def test_a_stop_while_another_stop_is_gone_on_from(source, tmp_path, monkeypatch):
    target = tmp_path / "out.safetensors"
    for limit in (1, 2, 3):
        with monkeypatch.context() as patch:
            Stopper(patch, limit, after=True)
            with pytest.raises(StopError):
                convert(source, target)
        assert not target.exists()
    convert(source, target)
    found = load_file(target)
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())


def test_a_log_that_is_torn_is_believed_up_to_the_tear(tmp_path):
    path = tmp_path / "0.log"
    row = b'[3, "aa", {}]\n'
    for text, rows in ((b"", 0), (row, 1), (row + row[:5], 1), (row + b"nonsense\n" + row, 1), (row + row[:-1], 1)):
        path.write_bytes(text)
        assert len(local_target._read_log(path)) == rows
