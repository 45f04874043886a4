from __future__ import annotations

import torch
from torch import nn

from vescale_ckpt.adapters.options import RestoreOptions


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


def two_groups(first, second):
    model = net()
    parts = {"a": model[0], "b": model[2], "c": model[4]}
    return model, torch.optim.AdamW(
        [{"params": [p for key in keys for p in parts[key].parameters()]} for keys in (first, second)]
    )


def saved_with(memory, make):
    model, optimizer = make
    step(model, optimizer)
    return memory.save({"m": model, "o": optimizer})


def target_with(make):
    return dict(zip(("m", "o"), make, strict=True))


def test_two_optimizers_over_one_model_keep_their_states_apart(memory):
    def make():
        model = net()
        return {
            "first": torch.optim.AdamW(model[0].parameters()),
            "second": torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1, momentum=0.9),
            "model": model,
        }

    saved, target = make(), make()
    for key in ("first", "second"):
        step(saved["model"], saved[key])
    memory.load(memory.save(saved), target)
    memory.same_optimizers(saved["first"], target["first"])
    memory.same_optimizers(saved["second"], target["second"])


def test_one_optimizer_over_two_models_whose_names_meet(memory):
    def make(seed):
        torch.manual_seed(seed)
        models = {"g": nn.Linear(4, 4), "d": nn.Linear(4, 4)}
        return models | {"o": torch.optim.AdamW([p for m in models.values() for p in m.parameters()])}

    saved, target = make(1), make(2)
    step(nn.Sequential(saved["g"], saved["d"]), saved["o"])
    stored = memory.save(saved)
    assert ("o", "state", "d.weight", "exp_avg") in stored.tensors
    memory.load(stored, target)
    memory.same_optimizers(saved["o"], target["o"])
    alone = {"g": target["g"], "o": torch.optim.AdamW(target["g"].parameters())}
    assert memory.problems(stored, alone, ignore=("d", "o.state.d")) == ()


def test_names_that_two_parameters_would_share_are_a_problem(memory):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    stored = memory.save({"g": model, "o": optimizer})
    g, d = nn.Linear(4, 4), nn.Linear(4, 4)
    both = torch.optim.AdamW([*g.parameters(), *d.parameters()])
    found = memory.problems(stored, {"g": g, "d": d, "o": both}, ignore=("d",))
    assert any("go by the name 'weight'" in line for line in found)


class Tied(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if tie:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


def tied(tie, *, reverse=False):
    torch.manual_seed(3)
    model = Tied(tie)
    parameters = list(model.parameters())
    return {"m": model, "o": torch.optim.AdamW(parameters[::-1] if reverse else parameters)}


def test_a_tied_parameter_has_one_state_under_any_of_its_names(memory):
    saved, target = tied(tie=True), tied(tie=True)
    step(saved["m"], saved["o"])
    memory.load(memory.save(saved), target)
    memory.same_optimizers(saved["o"], target["o"])


def test_a_parameter_that_was_tied_when_saved(memory):
    """As on two pipeline stages: each has the tied one under its own name."""
    saved, target = tied(tie=True), tied(tie=False)
    step(saved["m"], saved["o"])
    memory.load(memory.save(saved), target)
    expected = saved["o"].state[saved["m"].a.weight]["exp_avg"]
    for p in (target["m"].a.weight, target["m"].b.weight):
        assert torch.equal(target["o"].state[p]["exp_avg"], expected)
    step(target["m"], target["o"], 1)
    assert {state["step"].item() for state in target["o"].state.values()} == {3.0}  # each counts for itself


def test_a_parameter_that_was_not_tied_when_saved(memory):
    saved, target = tied(tie=False), tied(tie=True)
    step(saved["m"], saved["o"])
    stored = memory.save(saved)
    restore = memory.load(stored, target, same_content=lambda *_: True)
    state = target["o"].state[target["m"].a.weight]
    assert torch.equal(state["exp_avg"], saved["o"].state[saved["m"].a.weight]["exp_avg"])
    assert any("'b.weight'" in note for note in restore.notes)


def test_renamed_parameters_bring_their_state(memory):
    model = nn.ModuleDict({"enc": nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    step(model["enc"], optimizer)
    twin = nn.ModuleDict({"encoder": nn.Linear(4, 4)})
    fresh = torch.optim.AdamW(twin.parameters())
    stored = memory.save({"net": model, "o": optimizer})
    options = RestoreOptions(rename={"model": "net", "model.encoder": "net.enc"})
    memory.load(stored, {"model": twin, "o": fresh}, options=options)
    memory.same_optimizers(optimizer, fresh)


def test_a_state_dict_by_name_is_filled_from_an_optimizer(memory):
    """As torch.distributed.checkpoint's get_optimizer_state_dict makes it."""
    model, optimizer = two_groups("a", "bc")
    step(model, optimizer)
    stored = memory.save({"m": model, "o": optimizer})
    names = {p: name for name, p in model.named_parameters()}
    template = {
        "state": {names[p]: {k: torch.zeros_like(v) for k, v in s.items()} for p, s in optimizer.state.items()},
        "param_groups": [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups],
    }
    memory.load(stored, {"m": model, "o": template})
    assert torch.equal(template["state"]["0.weight"]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    # and the other way round
    twin, fresh = two_groups("a", "bc")
    memory.load(memory.save({"m": model, "o": template}), {"m": twin, "o": fresh})
    memory.same_optimizers(optimizer, fresh)
