from __future__ import annotations

import errno
import gc
import os

import pytest
import torch

from vescale_ckpt.errors import NoSpaceError, StorageError
from vescale_ckpt.stage.mapped import MappedMemory


def test_tensors_lie_side_by_side_in_one_file(tmp_path):
    shapes = [((3, 5), torch.float32), ((), torch.int64), ((7,), torch.bool), ((2, 0), torch.float64)]
    memory = MappedMemory(tmp_path / "made", [torch.empty(s, dtype=d).nbytes for s, d in shapes])
    tensors = [memory.empty(shape, dtype) for shape, dtype in shapes]
    for number, tensor in enumerate(tensors):
        assert (tensor.shape, tensor.dtype) == shapes[number]
        assert not tensor.any()
        tensor.fill_(1)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "saving one does not save all"
    memory.let_go()
    assert all(tensor.all() for tensor in tensors), "what is let go is not lost"
    assert list((tmp_path / "made").iterdir()) == [memory.path]
    assert memory.path.stat().st_size == memory.num_bytes == 3 * 64
    assert sum(memory.path.read_bytes()) == 15 * (0x80 + 0x3F) + 1 + 7


def test_the_file_may_go_and_the_memory_stays(tmp_path):
    memory = MappedMemory(tmp_path, [4000])
    tensor = memory.empty((1000,), torch.float32)
    memory.path.unlink()
    del memory
    gc.collect()
    tensor.fill_(3)
    assert tensor.sum() == 3000


def test_nothing_needs_no_memory(tmp_path):
    assert MappedMemory(tmp_path, []).empty((0, 3), torch.float32).shape == (0, 3)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoSpaceError, match="1,024 bytes"):
        MappedMemory(tmp_path, [1024])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        MappedMemory(tmp_path / "file", [1])
