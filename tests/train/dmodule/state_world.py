"""What four ranks do: save parallel models on one mesh, load them on others, and go on; FSDP2 around them."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import vescale_ckpt as vc
from tests.train import models
from tests.train.compare import apart, run, whole
from vescale_train.dmodule import apply
from vescale_train.mesh import axis, init
from vescale_train.planner import propose

MESHES = {"tp 4": {"tp": 4}, "dp 2 x tp 2": {"dp": 2, "tp": 2}, "dp 4": {"dp": 4}}


def values(model, optimizer):
    found = {name: whole(p).detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}/{key}": whole(value) for key, value in optimizer.state[p].items()}
    return {name: value.clone() for name, value in found.items()}


def trained(name, mesh, seed, steps, *, exact):
    """Return a parallel model and its optimizer after some steps on the same batches on every rank."""
    model = models.make(name, seed=seed)
    apply(model, mesh, propose(model, mesh), exact=exact)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer, number) for number in range(steps)]
    return model, optimizer, losses


def step(model, optimizer, number):
    loss = model(**models.batch(seed=number)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def saved_and_loaded(folder, name, *, exact):
    """Return, for every other mesh, whether what was saved came back to the bit, and the losses of going on."""
    model, optimizer, _ = trained(name, init(tp=4), 0, 2, exact=exact)
    wanted = values(model, optimizer)
    run_name = f"{name}-{exact}"
    with vc.Checkpointer(vc.open_store(f"{folder}/store"), run_name) as checkpointer:
        checkpointer.save(2, {"model": model, "optimizer": optimizer}).result()
        found = {"undisturbed": [step(model, optimizer, number) for number in (2, 3)]}
        for mesh_name, axes in MESHES.items():
            other, its_optimizer, _ = trained(name, init(**axes), 1, 1, exact=exact)
            checkpointer.load({"model": other, "optimizer": its_optimizer})
            got = values(other, its_optimizer)
            same = got.keys() == wanted.keys() and all(torch.equal(got[key], wanted[key]) for key in wanted)
            found[mesh_name] = [same, *(step(other, its_optimizer, number) for number in (2, 3))]
    return found


def sharded():
    """Return how far dp 2 x tp 2 with FSDP2 is from one device: each replica sees half of the batch."""
    mesh = init(dp=2, tp=2)
    inputs = models.batch(size=4)
    inputs["labels"] = inputs["input_ids"].clone()  # as many labels count in each half
    found = {}
    for name in ("llama", "gpt2"):
        model = models.make(name)
        apply(model, mesh, propose(model, mesh, sequence=True))
        replica = axis(mesh, "dp")
        for part in model.modules():
            if type(part).__name__ in {"LlamaDecoderLayer", "GPT2Block"}:
                fully_shard(part, mesh=replica)
        fully_shard(model, mesh=replica)
        mine = slice(2 * replica.get_local_rank(), 2 * replica.get_local_rank() + 2)
        part = {key: value[mine] for key, value in inputs.items() if value is not None}
        loss, gradient = run(model, part)
        dist.all_reduce(loss, group=replica.get_group())
        wanted = run(models.make(name), inputs)
        found[name] = apart(wanted, (loss / 2, gradient))
    return found


def main(folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own about FSDP2 and DTensor
    return {
        "fast": {name: saved_and_loaded(folder, name, exact=False) for name in ("llama", "gpt2", "bert")},
        "exact": {"gpt2": saved_and_loaded(folder, "gpt2", exact=True)},
        "sharded": sharded(),
    }
