from __future__ import annotations

import threading
import uuid

import pytest
import torch

from tests.distributed import simulated
from vescale_ckpt.execute.fill import Filler
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.plan.load_plan import Want, chunks_needed
from vescale_ckpt.state.leaf import Piece
from vescale_storage.backends.memory import MemoryBackend


def filled(tensor, boxes, views, name="w"):
    """Fill views of boxes from a stored tensor, without storage: chunks are cut from the tensor itself."""
    spread = simulated.replicated(name, tuple(tensor.shape), 1, full=tensor, dtype=tensor.dtype)
    manifest = simulated.save(MemoryBackend(uuid.uuid4().hex), [spread], 1).manifest
    pieces = [Piece(box, view) for box, view in zip(boxes, views, strict=True)]
    filler = Filler(manifest, pieces)
    assert filler.touched() == []
    for need in chunks_needed(manifest, [Want(0, box) for box in boxes]):
        raw = tensor[need.box.slices] if need.box.shape else tensor
        filler.deliver(need, raw.contiguous().reshape(-1).view(torch.uint8).clone())
    return filler


def test_each_view_gets_its_box_whatever_its_strides():
    tensor = torch.rand(600, 300)
    boxes = [Box.whole((600, 300)), Box((100, 50), (400, 100)), Box((599, 0), (1, 300)), Box((0, 0), (300, 200))]
    views = [torch.zeros(600, 300), torch.zeros(400, 200)[:, ::2], torch.zeros(1, 300), torch.zeros(200, 300).t()]
    filler = filled(tensor, boxes, views)
    for box, view in zip(boxes, views, strict=True):
        assert torch.equal(view, tensor[box.slices])
    assert filler.touched() == ["w"]


def test_what_lies_beside_a_view_is_left_alone():
    around = torch.full((10, 10), -1.0)
    filled(torch.ones(4, 4), [Box.whole((4, 4))], [around[3:7, 2:6]])
    assert around.sum() == 16 - 84


def test_scalars_and_parameters_that_need_gradients_are_filled():
    view = torch.zeros((), requires_grad=True)
    with torch.no_grad():
        filled(torch.tensor(2.5), [Box((), ())], [view])
    assert view.item() == 2.5
    assert view.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool])
def test_every_bit_survives(dtype):
    codes = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, codes, (64 * dtype.itemsize,), dtype=torch.uint8)
    view = torch.zeros(8, 8, dtype=dtype)
    filled(raw.view(dtype).view(8, 8), [Box.whole((8, 8))], [view])
    assert torch.equal(view.view(torch.uint8).view(-1), raw)


def test_another_dtype_is_filled_as_torch_converts():
    tensor = torch.tensor([1.5, -2.7, 3e38, float("nan")])
    views = [torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float64)]
    filled(tensor, [Box.whole((4,))] * 2, views)
    for view in views:
        assert torch.equal(view, tensor.to(view.dtype)) or torch.equal(view[:3], tensor.to(view.dtype)[:3])
        assert view[3].isnan()


def test_threads_may_deliver_at_once():
    tensor = torch.rand(1024, 512)
    spread = simulated.replicated("w", (1024, 512), 1, full=tensor)
    manifest = simulated.save(MemoryBackend(uuid.uuid4().hex), [spread], 1).manifest
    view = torch.zeros(1024, 512)
    filler = Filler(manifest, [Piece(Box.whole((1024, 512)), view)])
    needs = chunks_needed(manifest, [Want(0, Box.whole((1024, 512)))])

    def work(mine):
        for need in mine:
            filler.deliver(need, tensor[need.box.slices].contiguous().view(-1).view(torch.uint8).clone())

    threads = [threading.Thread(target=work, args=(needs[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert torch.equal(view, tensor)
