"""Stages by trace and by hand on two ranks, against one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from tests.train import models as hub
from tests.train.pipe.models import MODELS, ids
from tests.train.pipe.world import reference, refused, same_gradients
from vescale_train.pipe import BatchError, PipeEngine, PipelineParallelPlan, SplitError, manual_stage, traced_stage
from vescale_train.pipe.batch import as_batch, split_batch


def llama():
    tokens = ids(16, 12)
    model = hub.make("llama", num_hidden_layers=4, tie_word_embeddings=True)
    return model, lambda output: output.loss, {"input_ids": tokens, "labels": tokens}


def gpt2():
    tokens = ids(16, 12)
    return hub.make("gpt2", n_layer=4), lambda output: output.loss, {"input_ids": tokens, "labels": tokens}


def check() -> dict[str, int]:
    """Do all of it; return how many gradients were compared."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    made = {**{name: MODELS[name] for name in ("chain", "skips", "tied")}, "gpt2": gpt2, "llama": llama}
    done = {}
    for name, make in made.items():
        try:
            done[name] = traced(make, mesh)
        except Exception as error:
            raise AssertionError(f"{name}, rank {dist.get_rank()}") from error
    done["by hand"] = by_hand(mesh)
    return done


def traced(make, mesh) -> int:
    model, loss_fn, minibatch = make()
    plan = PipelineParallelPlan(num_microbatches=4, schedule_type="interleaved_1f1b", virtual_chunks=2, mode="trace")
    want, _, ref = reference(model, loss_fn, minibatch, 4)
    micro = split_batch(as_batch(minibatch, model, loss_fn), 4)[0]
    stage = traced_stage(model, plan, micro.kwargs or micro.args, mesh)
    engine = PipeEngine(stage, mesh, loss_fn)
    loss, _ = engine(minibatch)
    torch.testing.assert_close(loss, want)
    wanted = dict(ref.named_parameters(remove_duplicate=False))
    count = 0
    for name, parameter in stage.named_parameters():
        if wanted[name].grad is not None and parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted[name].grad, msg=lambda text, name=name: f"{name}: {text}")
            count += 1
    with torch.no_grad():
        part = torch.utils._pytree.tree_map(lambda leaf: leaf[:12], minibatch)
        refused(BatchError, "the model was traced with", engine, part)
    return count


class Half(nn.Module):
    """Two blocks; names start from 0 in every stage."""

    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x, gain=None):
        for layer in self.layers:
            x = torch.tanh(layer(x)) if gain is None else torch.tanh(layer(x)) * gain
        return x


def by_hand(mesh) -> int:
    torch.manual_seed(2)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    x, gain = torch.randn(8, 8), torch.rand(8, 8)

    def loss_fn(output, batch):
        return F.mse_loss(output, batch["x"])

    whole = Half(layers)
    _, _, ref = reference(whole, loss_fn, {"x": x, "gain": gain}, 4)
    rank = dist.get_rank()
    mine = Half(layers[2 * rank : 2 * rank + 2])
    plan = PipelineParallelPlan(num_microbatches=4, mode="manual")
    refused(SplitError, "both call a parameter 'layers.0.weight'", manual_stage, {rank: mine}, plan, mesh)
    names = {rank: {f"layers.{n}": f"layers.{n + 2 * rank}" for n in range(2)}}
    stage = manual_stage({rank: mine}, plan, mesh, names=names)
    PipeEngine(stage, mesh, loss_fn)({"x": x, "gain": gain})
    assert set(stage.state_dict()) == {f"layers.{2 * rank + n}.{kind}" for n in range(2) for kind in ("weight", "bias")}
    return same_gradients(stage, ref)
