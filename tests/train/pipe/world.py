"""What the ranks of one world of four do: every schedule on two and on four pipeline ranks, against one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from tests.train import models as hub
from tests.train.pipe.models import MODELS, ids
from vescale_train.pipe import (
    BatchError,
    PipeEngine,
    PipelineParallelPlan,
    construct_pipeline_stage,
    register_instruction,
)
from vescale_train.pipe.batch import as_batch, split_batch
from vescale_train.pipe.run.losses import scaled
from vescale_train.pipe.schedules import unregister_instruction
from vescale_train.rng import single_device_rng

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


def built(make, mesh, **options):
    """Return an engine for a model of the list, the loss and gradients of one process, and the minibatch."""
    model, loss_fn, minibatch = make()
    plan = PipelineParallelPlan(**{"num_microbatches": 4} | options)
    want, _, ref = reference(model, loss_fn, minibatch, plan.num_microbatches)
    stage = construct_pipeline_stage(model, plan, mesh)
    return PipeEngine(stage, mesh, loss_fn, plan), want, ref, minibatch


def check_engine() -> list[str]:
    """Run everything else that an engine does; return the names of what was checked."""
    done = []
    both = meshes()
    for check in (
        other_models,
        uneven_micro_batches,
        changed_lengths,
        evaluation,
        accumulation,
        other_minibatches,
        own_schedule,
        dropout,
        ties_by_sums,
        more_virtual_chunks,
    ):
        try:
            check(both)
        except Exception as error:
            raise AssertionError(f"{check.__name__}, rank {dist.get_rank()}") from error
        done.append(check.__name__)
    return done


def other_models(both):
    """Models of other people, unchanged, with a head tied to the embedding, under a schedule that splits backwards."""
    for name, changed in (("gpt2", {"n_layer": 8}), ("llama", {"num_hidden_layers": 8, "tie_word_embeddings": True})):
        tokens = ids(8, 12)
        batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
        for kind in ("zero_bubble", "zbv"):
            make = lambda: (hub.make(name, **changed), lambda output: output.loss, batch)  # noqa: B023, E731
            engine, want, ref, minibatch = built(make, both[4], schedule_type=kind, virtual_chunks=2)
            loss, _ = PipeEngine(engine.stage)(minibatch)
            assert torch.equal(loss, want)
            assert same_gradients(engine.stage, ref)


def uneven_micro_batches(both):
    """Ten samples in four micro-batches, and four ranks with fewer micro-batches than stages."""
    x = torch.randn(10, 8, generator=torch.Generator().manual_seed(5))
    model, loss_fn, _ = MODELS["chain"]()
    for num_microbatches, mesh, reduction in ((4, both[2], "mean"), (3, both[4], "sum"), (1, both[4], "mean")):
        want, _, ref = reference(model, loss_fn, (x, x.flip(0)), num_microbatches, reduction=reduction)
        plan = PipelineParallelPlan(num_microbatches=num_microbatches, loss_reduction=reduction)
        engine = PipeEngine(construct_pipeline_stage(copy.deepcopy(model), plan, mesh), mesh, loss_fn)
        loss, _ = engine((x, x.flip(0)))
        assert torch.equal(loss, want)
        assert same_gradients(engine.stage, ref)


def changed_lengths(both):
    """Other lengths and sizes on one engine, and back."""
    model, loss_fn, _ = MODELS["frozen front"]()
    plan = PipelineParallelPlan(num_microbatches=4, schedule_type="zero_bubble", virtual_chunks=2)
    engine = PipeEngine(construct_pipeline_stage(copy.deepcopy(model), plan, both[4]), None, loss_fn)
    for batch, length in ((8, 6), (8, 9), (12, 3), (8, 6)):
        minibatch = {"ids": ids(batch, length)}
        want, _, ref = reference(model, loss_fn, minibatch, 4)
        engine.stage.zero_grad()
        loss, _ = engine(minibatch)
        assert torch.equal(loss, want)
        same_gradients(engine.stage, ref)


def evaluation(both):
    """Without gradients: loss on all ranks, outputs on the last stage, no gradient anywhere; training goes on after."""
    for mesh, kind in ((both[4], "zbv"), (both[2], "1f1b")):
        engine, want, ref, minibatch = built(MODELS["tied"], mesh, schedule_type=kind)
        with torch.no_grad():
            loss, outputs = engine(minibatch)
        assert torch.equal(loss, want)
        assert (outputs is not None) == (engine.stage.num_stages - 1 in engine.stage.stages)
        assert outputs is None or len(outputs) == 4
        assert all(parameter.grad is None for parameter in engine.stage.parameters())
        assert engine.losses.shape == (4,)
        engine(minibatch)
        assert same_gradients(engine.stage, ref)
        assert torch.equal(engine(minibatch, forward_only=True)[0], want)


def accumulation(both):
    """Three minibatches before a step: each loss is divided once."""
    model, loss_fn, minibatch = MODELS["tied"]()
    plan = PipelineParallelPlan(num_microbatches=4, schedule_type="interleaved_1f1b", virtual_chunks=2)
    _, _, ref = reference(model, loss_fn, minibatch, 4, steps=3)
    engine = PipeEngine(construct_pipeline_stage(model, plan, both[2]), None, loss_fn)
    for _ in range(3):
        engine(minibatch, num_accumulated=3)
    assert same_gradients(engine.stage, ref)


def other_minibatches(both):
    """Ranks that were given different things, or one that cannot be cut, say so on every rank and go on after."""
    engine, want, _, minibatch = built(MODELS["tied"], both[4])
    mine = dist.get_rank()
    refused(
        BatchError, "were given different ones", engine, {k: v[: 8 + 4 * (mine == 2)] for k, v in minibatch.items()}
    )
    few = {k: v[:2] for k, v in minibatch.items()}
    refused(BatchError, "2 samples into 4 micro-batches", engine, few)
    only_one = few if mine == 1 else minibatch
    refused(BatchError, "2 samples into 4 micro-batches", engine, only_one)
    assert torch.equal(engine(minibatch)[0], want)


def refused(kind, text, call, *args, **options):
    with pytest.raises(kind, match=text):
        call(*args, **options)


def own_schedule(both):
    """A schedule written as text, with an instruction of its own."""
    seen = []
    register_instruction("NOTE", lambda instruction, context: seen.append((str(instruction), context.engine)))
    text = "0F0..3,0NOTE,0B3,0B2,0B1,0B0\n1F0..3,1B3,1NOTE3,1B2,1B1,1B0\n"
    engine, want, ref, minibatch = built(MODELS["tied"], both[2], schedule_type=text)
    loss, _ = engine(minibatch)
    assert torch.equal(loss, want)
    assert same_gradients(engine.stage, ref)
    assert seen == [(("0NOTE", "1NOTE3")[engine.stage.place.rank], engine)]
    unregister_instruction("NOTE")


def dropout(both):
    """Under ``single_device_rng`` every sample has the numbers of one device, on any stage."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(8)])
    x = torch.randn(10, 8)
    ref = copy.deepcopy(model)
    with single_device_rng(11, ref) as rng:
        rng.start_step(5)
        losses = []
        for micro in split_batch(as_batch((x, x), ref, F.mse_loss), 4):
            with rng.batch(micro.start, micro.count, micro.total):
                loss = scaled(F.mse_loss(ref(*micro.args), micro.target), micro.share, "mean")
            loss.backward()
            losses.append(loss.detach())
    for kind in ("1f1b", "zbv"):
        plan = PipelineParallelPlan(num_microbatches=4, schedule_type=kind)
        engine = PipeEngine(construct_pipeline_stage(copy.deepcopy(model), plan, both[4]), None, F.mse_loss)
        with single_device_rng(11, engine.stage.module) as rng:
            rng.start_step(5)
            engine((x, x))
        assert torch.equal(engine.losses, torch.stack(losses))
        assert same_gradients(engine.stage, ref)


def ties_by_sums(both):
    """Without exact mode tied gradients are sums of stages' sums: the same on all of them, and near."""
    engine, _, ref, minibatch = built(MODELS["tied"], both[4], exact=False, schedule_type="zbv")
    engine(minibatch)
    wanted = dict(ref.named_parameters(remove_duplicate=False))
    for name, parameter in engine.stage.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(parameter.grad, wanted[name].grad)


def more_virtual_chunks(both):
    """Four chunks on each of two ranks, cut by cost."""
    options = {"schedule_type": "interleaved_1f1b", "virtual_chunks": 4, "split_method": "auto"}
    engine, want, ref, minibatch = built(MODELS["tied"], both[2], **options)
    assert len(engine.stage.stages) == 4
    assert torch.equal(engine(minibatch)[0], want)
    assert same_gradients(engine.stage, ref)
