"""The engine: one call runs a minibatch through all stages and gives every rank the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from vescale_train.errors import ConfigError
from vescale_train.pipe.agree import agree
from vescale_train.pipe.alive import SignsOfLife
from vescale_train.pipe.batch import MicroBatch, as_batch, form_of, split_batch
from vescale_train.pipe.random_numbers import numbers_of
from vescale_train.pipe.run.losses import scaled, share_losses, total
from vescale_train.pipe.run.stage import Forwarded
from vescale_train.pipe.run.ties import sum_ties
from vescale_train.pipe.runner import Runner
from vescale_train.pipe.wrapping import sharding_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from vescale_train.pipe.model.flow import Routes
    from vescale_train.pipe.plan import PipelineParallelPlan
    from vescale_train.pipe.stage import PipeStage


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a user's instruction is given beside itself."""

    engine: PipeEngine
    stage: PipeStage


class _Step:
    """One minibatch on its way through this rank's stages."""

    def __init__(
        self,
        micros: Sequence[MicroBatch],
        routes: Sequence[Routes],
        form: str,
        loss_fn: Callable[..., Any] | None,
        *,
        reduction: str,
        num_accumulated: int,
        forward_only: bool,
    ) -> None:
        self.micros, self.routes, self.form, self.loss_fn = micros, routes, form, loss_fn
        self.reduction, self.num_accumulated, self.forward_only = reduction, num_accumulated, forward_only
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self._drawn: set[int] = set()

    def key(self, microbatch: int) -> object:
        """Return what is equal for micro-batches whose tensors look alike: the step's form and the number."""
        return self.form, microbatch

    def forward(self, stage: int, module: nn.Module, microbatch: int, received: Sequence[torch.Tensor]) -> Forwarded:
        """Run a stage's part of one micro-batch and, on the last stage, its loss."""
        micro, routes = self.micros[microbatch], self.routes[microbatch]
        with numbers_of(micro, again=microbatch in self._drawn):
            sent, output = module(routes, received, micro.args, micro.kwargs)
        self._drawn.add(microbatch)
        if stage + 1 < routes.num_stages:
            return Forwarded(sent=sent)
        self.outputs[microbatch] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        loss = self._loss(output, micro)
        if loss is None:
            return Forwarded(sent=())
        weighted = scaled(loss, micro.share, self.reduction)
        self.losses[microbatch] = weighted.detach()
        return Forwarded(sent=(), loss=weighted if self.num_accumulated == 1 else weighted / self.num_accumulated)

    def _loss(self, output: Any, micro: MicroBatch) -> torch.Tensor | None:
        if self.loss_fn is not None:
            arguments = (output,) if micro.target is None else (output, micro.target)
            found: Any = self.loss_fn(*arguments)
        else:
            found = output if isinstance(output, torch.Tensor) and not output.ndim else getattr(output, "loss", None)
            found = output.get("loss") if found is None and isinstance(output, dict) else found
        if not isinstance(found, torch.Tensor) and not self.forward_only:
            raise ConfigError(
                f"cannot train: there is no loss_fn and the model's output ({type(output).__name__}) has no loss; "
                "pass loss_fn, or give the model its labels"
            )
        return found if isinstance(found, torch.Tensor) else None


class PipeEngine:
    """Runs minibatches through a pipeline: ``loss, outputs = engine(minibatch)``.

    Every pipeline rank is called with the same minibatch, as every line of a training script runs on all of them:
    inputs that a late stage needs (masks, positions, labels) are there already and are not sent.
    """

    def __init__(
        self,
        stage: PipeStage,
        mesh: DeviceMesh | None = None,
        loss_fn: Callable[..., Any] | None = None,
        plan: PipelineParallelPlan | None = None,
        *,
        on_reduce: Callable[[int], None] | None = None,
    ) -> None:
        """Make an engine for a stage, after its chunks were wrapped.

        Args:
            stage: what ``construct_pipeline_stage`` gave.
            mesh: the mesh that the stage was made with; only checked.
            loss_fn: takes the model's output, or the output and a target (see ``as_batch``), and returns a scalar.
                None takes the ``loss`` in the model's output, or an output that is a scalar.
            plan: the plan that the stage was made with; only checked.
            on_reduce: called with the number of a stage of this rank when its gradients are complete, except those of
                tied parameters, which are complete when the engine returns.

        Raises:
            ScheduleError: the schedule is wrong, or torch gets it wrong with the wrapping of the stages.
            ConfigError: mesh or plan are not those of the stage.
        """
        if plan not in {None, stage.plan} or (mesh is not None and stage.place.mesh not in {None, mesh}):
            raise ConfigError("cannot make a pipeline engine: the stage was made with another plan or mesh")
        self.stage, self.loss_fn, self.plan = stage, loss_fn, stage.plan
        self._on_reduce = on_reduce or (lambda stage: None)  # noqa: ARG005
        self._runners: dict[bool, Runner] = {}
        self._routes: dict[str, Routes] = {}
        self._context = Context(engine=self, stage=stage)
        self._sharding = sharding_of(stage.chunks)
        self.losses: torch.Tensor | None = None
        """The weighted losses of the last minibatch's micro-batches, in order; they add up to its loss."""
        self._runner(forward_only=self.plan.forward_only)
        self._signs = SignsOfLife(stage.place)

    def __call__(
        self, minibatch: Any, *, forward_only: bool | None = None, num_accumulated: int = 1
    ) -> tuple[torch.Tensor | None, list[Any] | None]:
        """Run a minibatch forward, and backward unless told otherwise; gradients are added to what is there.

        Args:
            minibatch: see ``as_batch``; the same on every pipeline rank.
            forward_only: None is the plan's word, or true where gradients are off.
            num_accumulated: minibatches whose gradients the caller adds up before a step; each loss is divided by it
                before it is differentiated. The loss returned is not.

        Returns:
            The loss of the minibatch, the same on every rank (None if there is none, in evaluation), and the model's
            outputs by micro-batch, without gradients, on the rank of the last stage (None elsewhere).

        Raises:
            BatchError: the minibatch cannot be run, or ranks were given different ones; raised on all ranks before
                anything is sent.
            SplitError: the flow of the model for this minibatch does not fit the stages; likewise.
            RankFailureError: another rank died or gave up in the middle of the step; names it.
        """
        if forward_only is None:
            forward_only = self.plan.forward_only or not torch.is_grad_enabled()
        runner = self._runner(forward_only=forward_only)
        step = agree(self.stage.place, lambda: self._prepare(minibatch, forward_only, num_accumulated))
        with self._signs.naming_the_dead(), torch.set_grad_enabled(not forward_only and torch.is_grad_enabled()):
            runner.run(step)
            if not forward_only:
                sum_ties(self.stage, runner.units, exact=runner.keeps_units)
            self.losses = share_losses(self.stage, step.losses, runner.device)
        outputs = [step.outputs[number] for number in sorted(step.outputs)] if step.outputs else None
        return (None if self.losses is None else total(self.losses)), outputs

    def _prepare(self, minibatch: Any, forward_only: bool, num_accumulated: int) -> tuple[str, _Step]:
        training = self.stage.module.training
        batch = as_batch(minibatch, self.stage.front.called, self.loss_fn)
        micros = split_batch(batch, self.plan.num_microbatches, self.plan.whole)
        mode = f"{training} {forward_only} {torch.is_grad_enabled()}"
        forms = [f"{mode} {form_of((micro.args, micro.kwargs))}" for micro in micros]
        for form, micro in zip(forms, micros, strict=True):
            if form not in self._routes:
                self._routes[form] = self.stage.front.routes(micro.args, micro.kwargs, training=training)
        whole = "\n".join([*forms, form_of(batch.target) if batch.target is not None else ""])
        step = _Step(
            micros,
            [self._routes[form] for form in forms],
            whole,
            self.loss_fn,
            reduction=self.plan.loss_reduction,
            num_accumulated=num_accumulated,
            forward_only=forward_only,
        )
        return whole, step

    def _runner(self, *, forward_only: bool) -> Runner:
        if forward_only not in self._runners:
            self._runners[forward_only] = Runner(
                self.stage,
                self._sharding,
                forward_only=forward_only,
                context=self._context,
                on_reduce=self._on_reduce,
            )
        return self._runners[forward_only]
