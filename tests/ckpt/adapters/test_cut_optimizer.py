from __future__ import annotations

import torch
from torch import nn

from vescale_ckpt.adapters.cut_optimizer import CutOptimizer, plain_optimizer
from vescale_ckpt.state.sharded_view import ShardedView


class Rows(torch.optim.Optimizer):
    """Shows whole parameters and keeps the momentum of all their rows, as one piece."""

    def __init__(self, parameters, plain) -> None:
        super().__init__(parameters, plain.defaults)
        self.optimizer = plain
        self.asked: list[torch.dtype] = []

    def new_state(self, parameter, dtype):
        self.asked.append(dtype)
        return ShardedView(parameter.shape, dtype, [((0,) * parameter.ndim, torch.zeros(parameter.shape, dtype=dtype))])


def momentum(value: float):
    model = nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        plain.state[parameter] = {"momentum_buffer": torch.full_like(parameter, value).detach()}
    return model, plain


def test_only_what_makes_its_own_memory_is_a_cut_optimizer():
    model, plain = momentum(1.0)
    cut = Rows(model.parameters(), plain)
    assert isinstance(cut, CutOptimizer)
    assert not isinstance(plain, CutOptimizer)
    assert plain_optimizer(cut) is plain
    assert plain_optimizer(plain) is plain


def test_a_cut_optimizer_takes_a_plain_ones_state_into_memory_of_its_own(memory):
    model, plain = momentum(3.0)
    stored = memory.save({"model": model, "optimizer": plain})
    twin, other = momentum(0.0)
    cut = Rows(twin.parameters(), other)
    memory.load(stored, {"model": twin, "optimizer": cut})
    values = [cut.state[p]["momentum_buffer"] for p in twin.parameters()]
    assert cut.asked == [torch.float32] * 2
    assert all(isinstance(value, ShardedView) and (value.pieces[0][1] == 3).all() for value in values)


def test_a_plain_optimizer_takes_a_cut_ones_state_and_what_is_there_is_filled_in_place(memory):
    model, plain = momentum(0.0)
    cut = Rows(model.parameters(), plain)
    pieces = []
    for parameter in model.parameters():
        view = cut.new_state(parameter, torch.float32)
        pieces.append(view.pieces[0][1].fill_(7.0))
        cut.state[parameter] = {"momentum_buffer": view}
    stored = memory.save({"model": model, "optimizer": cut})
    twin, other = momentum(1.0)
    memory.load(stored, {"model": twin, "optimizer": other})
    assert all((other.state[p]["momentum_buffer"] == 7).all() for p in twin.parameters())
    for piece in pieces:
        piece.zero_()
    cut.asked.clear()
    memory.load(stored, {"model": model, "optimizer": cut})
    assert not cut.asked
    assert all((piece == 7).all() for piece in pieces)


def test_a_wrapper_that_says_what_it_wraps_gives_its_name_to_nothing(memory):
    class Wrapper(nn.Module):
        checkpoint_wraps = "inside"

        def __init__(self, inside) -> None:
            super().__init__()
            self.inside = inside
            self.more = nn.Linear(1, 1)

    model = nn.Linear(3, 2)
    stored = memory.save({"model": Wrapper(model)})
    twin = nn.Linear(3, 2)
    memory.load(stored, {"model": twin})
    assert torch.equal(twin.weight, model.weight)
