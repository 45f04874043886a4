from __future__ import annotations

import copy

import pytest
import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2))


def step(model, optimizer, n=2, start=0):
    for i in range(start, start + n):
        generator = torch.Generator().manual_seed(100 + i)
        data = torch.randn(5, 4, generator=generator)

        def closure(data=data):
            optimizer.zero_grad()
            loss = model(data).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()


def goes_on(memory, make, n=2, fresh_steps=0):
    """Assert that what was saved goes on in a fresh optimizer, bit by bit as without the break."""
    model, optimizer = make()
    step(model, optimizer, n)
    stored = memory.save({"model": model, "optimizer": optimizer})
    twin, fresh = make()
    with torch.no_grad():
        for p in twin.parameters():
            p.fill_(0.5)
    step(twin, fresh, fresh_steps, start=50)
    for group in fresh.param_groups:
        group["lr"] = 77.0
    restore = memory.load(stored, {"model": twin, "optimizer": fresh})
    memory.same_optimizers(optimizer, fresh)
    step(model, optimizer, 3, start=n)
    step(twin, fresh, 3, start=n)
    memory.same_optimizers(optimizer, fresh)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    return restore


OPTIMIZERS = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "foreach": False}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.LBFGS, {"max_iter": 3, "history_size": 4}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=str)
@pytest.mark.parametrize("fresh_steps", [0, 1])
def test_every_optimizer_goes_on_from_a_fresh_one_and_from_a_used_one(memory, cls, options, fresh_steps):
    if cls is torch.optim.LBFGS and fresh_steps:
        fresh_steps = 3  # its history has another length then

    def make():
        model = net()
        return model, cls(model.parameters(), **options)

    goes_on(memory, make, fresh_steps=fresh_steps)


def test_muon_goes_on(memory):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")

    def make():
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False))
        return model, torch.optim.Muon(model.parameters())

    goes_on(memory, make)


def test_sparse_adam_goes_on(memory):
    def make():
        torch.manual_seed(0)
        model = nn.Embedding(5, 3, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters())

    model, optimizer = make()
    model(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    twin, fresh = make()
    memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": fresh})
    memory.same_optimizers(optimizer, fresh)


# what is uneven


def frozen():
    model = net()
    for p in model[0].parameters():
        p.requires_grad_(False)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def one_without_gradient():
    model = net()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model, torch.optim.AdamW(model.parameters())


def groups():
    model = net()
    return model, torch.optim.AdamW([
        {"params": model[0].parameters(), "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0},
        {"params": model[2].parameters(), "lr": 5e-4, "betas": (0.8, 0.99), "weight_decay": 0.1, "tag": "mid"},
        {"params": []},
        {"params": model[4].parameters(), "lr": 2e-4},
    ])  # fmt: skip


class Lora(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


def lora():
    model = net()
    model[0], model[2] = Lora(model[0]), Lora(model[2])
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("make", [frozen, one_without_gradient, groups, lora])
@pytest.mark.parametrize("n", [0, 2])
def test_uneven_optimizers_go_on(memory, make, n):
    goes_on(memory, make, n=n)


def test_custom_keys_come_back_though_the_target_lacks_them(memory):
    model, optimizer = groups()
    twin, fresh = groups()
    del fresh.param_groups[1]["tag"]
    fresh.param_groups[3]["mine"] = 1
    restore = memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": fresh})
    assert fresh.param_groups[1]["tag"] == "mid"
    assert any("kept: mine" in note for note in restore.notes)


def test_state_of_a_parameter_that_has_none_stored_is_cleared(memory):
    model, optimizer = one_without_gradient()
    step(model, optimizer)
    twin, used = one_without_gradient()
    twin.unused.grad = torch.ones(3)
    step(twin, used, 1)
    twin.unused.grad = torch.ones(3)
    used.step()
    assert twin.unused in used.state
    restore = memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": used})
    memory.same_optimizers(optimizer, used)
    assert any("'o.state.unused'" in note and "cleared" in note for note in restore.notes)


def test_tensors_of_a_used_optimizer_are_filled_in_place(memory):
    model, optimizer = frozen()
    step(model, optimizer)
    twin, used = frozen()
    step(twin, used, 1)
    before = used.state[twin[2].weight]["exp_avg"]
    memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": used})
    assert used.state[twin[2].weight]["exp_avg"] is before


def test_planning_makes_no_state(memory):
    model, optimizer = groups()
    step(model, optimizer)
    twin, fresh = groups()
    before = copy.deepcopy(fresh.state_dict())
    memory.plan(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": fresh})
    assert len(fresh.state) == 0
    assert fresh.state_dict() == before


# steps in different places


def test_steps_come_back_where_they_were(memory):
    """Per parameter, per group, or both with different values: each where it was."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    optimizer.param_groups[0]["step"] = 9
    optimizer.state[model[0].weight]["step"].fill_(5)
    twin = net()
    fresh = torch.optim.AdamW(twin.parameters())
    memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": fresh})
    assert fresh.param_groups[0]["step"] == 9
    assert fresh.state[twin[0].weight]["step"].item() == 5
    assert fresh.state[twin[0].bias]["step"].item() == 2


def test_a_step_that_is_a_number_stays_one(memory):
    class Counts(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):  # noqa: ARG002
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("rows", torch.zeros(p.shape[0], 1))
            self.state["rounds"] = self.state.get("rounds", 0) + 1

    model, twin = net(), net()
    optimizer, fresh = Counts(model.parameters()), Counts(twin.parameters())
    optimizer.step()
    memory.load(memory.save({"m": model, "o": optimizer}), {"m": twin, "o": fresh})
    assert fresh.state[twin[0].weight]["step"] == 1
    assert fresh.state[twin[0].weight]["rows"].shape == (6, 1)
    assert fresh.state["rounds"] == 1
