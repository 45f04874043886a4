"""What the ranks of one world of four do: every schedule on two and on four pipeline ranks, against one process."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.train.pipe.models import MODELS
from vescale_train.pipe import PipeEngine, PipelineParallelPlan, construct_pipeline_stage
from vescale_train.pipe.batch import as_batch, split_batch
from vescale_train.pipe.run.losses import scaled

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "looped_bfs": 2, "zero_bubble": 2, "zbv": 2, "dualpipe_v": 2}


ON_RANKS = {2: ("frozen and tied", "frozen front"), 4: ("frozen and tied", "skips", "chain")}
"""Models to run on so many ranks."""


def reference(model, loss_fn, minibatch, num_microbatches, *, reduction="mean", steps=1):
    """Run micro-batches one after the other in one process; return the loss, the outputs and the model."""
    model = copy.deepcopy(model)
    for _ in range(steps):
        losses, outputs = [], []
        for micro in split_batch(as_batch(minibatch, model, loss_fn), num_microbatches):
            output = model(*micro.args, **micro.kwargs)
            loss = loss_fn(output) if micro.target is None else loss_fn(output, micro.target)
            weighted = scaled(loss, micro.share, reduction)
            (weighted / steps if steps > 1 else weighted).backward()
            losses.append(weighted.detach())
            outputs.append(output)
    total = losses[0].clone()
    for loss in losses[1:]:
        total += loss
    return total, outputs, model


def same_gradients(stage, model):
    """Compare every parameter that this rank holds with the one process's, to the bit; return how many there were."""
    wanted = dict(model.named_parameters(remove_duplicate=False))
    count = 0
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        want = wanted[name].grad
        assert (parameter.grad is None) == (want is None), f"{name}: {parameter.grad} instead of {want}"
        if want is not None:
            assert torch.equal(parameter.grad, want), f"{name}: off by {(parameter.grad - want).abs().max()}"
            count += 1
    return count


def meshes():
    """Two pipelines of two ranks, and one of four."""
    return {
        2: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")),
        4: init_device_mesh("cpu", (4,), mesh_dim_names=("pp",)),
    }


def check_schedules() -> dict[str, int]:
    """Run every schedule with every model."""
    done = {}
    for num_ranks, mesh in meshes().items():
        for kind, chunks in SCHEDULES.items():
            for name in ON_RANKS[num_ranks]:
                model, loss_fn, minibatch = MODELS[name]()
                plan = PipelineParallelPlan(num_microbatches=8, schedule_type=kind, virtual_chunks=chunks)
                want, outputs, ref = reference(model, loss_fn, minibatch, 8)
                stage = construct_pipeline_stage(model, plan, mesh)
                engine = PipeEngine(stage, mesh, loss_fn, plan)
                label = f"{kind} {name} on {num_ranks}"
                try:
                    loss, got = engine(minibatch)
                    assert torch.equal(loss, want), (loss, want)
                    done[label] = same_gradients(stage, ref)
                    if got is not None:
                        compare_outputs(got, outputs)
                except Exception as error:
                    raise AssertionError(f"{label}, rank {dist.get_rank()}") from error
    return done


def compare_outputs(got, want):
    """Compare trees of outputs."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        (leaves, spec), (other, other_spec) = map(torch.utils._pytree.tree_flatten, (a, b))
        assert spec == other_spec
        for x, y in zip(leaves, other, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
            assert not isinstance(x, torch.Tensor) or not x.requires_grad
