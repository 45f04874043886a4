"""ZeRO-1 and ZeRO-2: each rank updates its share of the flat parameters, then all ranks gather them.

To its user, to a scheduler and to a checkpoint it is an optimizer of the model's own parameters: groups and state go
by them, so what is saved resumes as a plain optimizer on one rank, and back, to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vescale_train.ddp import DistributedDataParallel
from vescale_train.ddp.local import like_parameter
from vescale_train.errors import ConfigError, StateError
from vescale_train.optim.norm import GradientPart, clip_parts, shard_groups
from vescale_train.optim.shards import ParameterBucket
from vescale_train.optim.state_dict import copy_options, load_named_state, named_state
from vescale_train.optim.zero_state import ShardedState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch.distributed as dist

    from vescale_ckpt.state.sharded_view import ShardedView

NOT_ELEMENTWISE = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})


class DistributedOptimizer(torch.optim.Optimizer):
    """Steps a plain optimizer on this rank's share of the parameters.

    The optimizer must treat every element by itself, as Adam and SGD do. On one rank it works too, and gives
    parameters of less than float32 their master copies.

    Args:
        optimizer: made for the parameters of the models, and not stepped yet. It is taken over: its parameters are
            replaced by shards. Options are read from, and changed in, ``param_groups`` of this one.
        models: wrapped with ``use_distributed_optimizer=True``.
        clip_grad: largest norm of all gradients together; 0 does not clip.
        overlap_param_gather: return from a step at once and wait for parameters where a forward needs them. Read them
            otherwise only after ``finish_param_sync``.
        grad_to_fp32: keep float32 masters of parameters of less precision, and update these.
        pipeline_group: the ranks that hold the other stages of the same model, for the norm.

    Raises:
        ConfigError: models, parameters and optimizer do not belong together.
        StateError: the optimizer has stepped.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        models: DistributedDataParallel | Sequence[DistributedDataParallel],
        *,
        clip_grad: float = 0.0,
        overlap_param_gather: bool = False,
        grad_to_fp32: bool = True,
        pipeline_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._is_made = False
        self.models = (models,) if isinstance(models, DistributedDataParallel) else tuple(models)
        self.optimizer = optimizer
        """The plain one, on shards."""
        self.clip_grad = clip_grad
        self.grad_norm: torch.Tensor | None = None
        """Norm of all gradients of the last step, before clipping; None unless ``clip_grad``."""
        self._pipeline_group = pipeline_group
        self._overlap = overlap_param_gather
        self._refuse_unfit()
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        self._buckets = tuple(ParameterBucket(b, master=grad_to_fp32) for m in self.models for b in m.buckets)
        shards = {id(shard.parameter): shard for bucket in self._buckets for shard in bucket.shards}
        for group in optimizer.param_groups:
            group["params"] = [shards[id(p)].flat for p in group["params"] if id(p) in shards]
        self._mine = {id(p) for group in self.param_groups for p in group["params"]} & set(shards)
        self._names = {id(p): name for m in self.models for name, p in m.module.named_parameters()}
        self.state = ShardedState(optimizer, self._buckets, self.finish_param_sync)  # type: ignore[assignment]
        if overlap_param_gather:
            self._wait_in_forward()
        self._is_made = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Reduce gradients that are not reduced yet, clip, update, and gather the parameters; on all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for model in self.models:
            model.finish_grad_sync()
        unused = frozenset[int]().union(*(model.unused() for model in self.models))
        with torch.no_grad():
            self.finish_param_sync()
            for bucket in self._buckets:
                bucket.take_gradients(unused)
                bucket.adopt_written()
            self.grad_norm = self._clip(unused) if self.clip_grad > 0 else None
            self._step_shards()
            self.sharded_state.mark_stepped(self._mine - unused)
            # the first layers are needed first, and their bucket is the last
            for bucket in reversed(self._buckets):
                bucket.start_gather()
        if not self._overlap:
            self.finish_param_sync()
        return loss

    def finish_param_sync(self) -> None:
        """Wait until all parameters are whole and new on this rank."""
        for bucket in self._buckets:
            bucket.finish_gather()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, in the buffers too."""
        for model in self.models:
            model.zero_grad(set_to_none)
        for bucket in self._buckets:
            for shard in bucket.shards:
                shard.flat.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups that come late: the flat buffers are laid out."""
        if self._is_made:
            raise ConfigError("cannot add a group to a DistributedOptimizer; add it to the optimizer it is made from")
        super().add_param_group(param_group)

    def new_state(self, parameter: torch.Tensor, dtype: torch.dtype) -> ShardedView:
        """Return fresh memory for one value of a parameter's state; a checkpoint fills it and sets it in ``state``."""
        return self.sharded_state.new_state(parameter, dtype)

    @property
    def sharded_state(self) -> ShardedState:
        """``state`` by its own type."""
        state: Any = self.state
        return state  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state by parameters' names; this rank's part of each value, as a ``ShardedView``."""
        return named_state(self, self._names)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` of this, or of a plain optimizer of the same model, returned.

        Raises:
            InvalidInputError: it names other parameters or groups.
        """
        load_named_state(self, state_dict, self._names)

    def _clip(self, unused: frozenset[int]) -> torch.Tensor:
        exact = any(model.options.exact for model in self.models)
        parts = [part for model in self.models for part in self._parts(model, unused, exact)]
        return clip_parts(parts, self.clip_grad, pipeline_group=self._pipeline_group, exact=exact)

    def _parts(self, model: DistributedDataParallel, unused: frozenset[int], exact: bool) -> Iterable[GradientPart]:
        for bucket in self._buckets:
            if bucket.gradients not in model.buckets:
                continue
            if exact:
                bucket.gradients.gather()
            for number, shard in enumerate(bucket.shards):
                parameter = shard.parameter
                if id(parameter) in unused or id(parameter) not in self._mine:
                    continue
                yield GradientPart(
                    name=self._names[id(parameter)],
                    local=shard.flat.grad,
                    groups=(*shard_groups(parameter), *(() if model.num_ranks == 1 else (model.group,))),
                    whole=like_parameter(parameter, bucket.gradients.gradient(number)) if exact else None,
                )

    def _step_shards(self) -> None:
        """Step the plain optimizer with the options of our groups; keep those that it changes."""
        copy_options(self.param_groups, to=self.optimizer.param_groups)
        self.optimizer.step()
        copy_options(self.optimizer.param_groups, to=self.param_groups)

    def _wait_in_forward(self) -> None:
        place = {id(shard.parameter): bucket for bucket in self._buckets for shard in bucket.shards}
        for model in self.models:
            for module in model.module.modules():
                found = {id(p): place[id(p)] for p in module.parameters(recurse=False) if id(p) in place}
                if found:
                    buckets = tuple(dict.fromkeys(found.values()))
                    module.register_forward_pre_hook(lambda *_, buckets=buckets: _finish(buckets))

    def _refuse_unfit(self) -> None:
        kind = type(self.optimizer).__name__
        if kind in NOT_ELEMENTWISE:
            raise ConfigError(f"cannot shard {kind}: it needs whole parameters; use BasicOptimizer, or Muon by owner")
        if self.optimizer.state:
            raise StateError(f"this {kind} has state already; make it anew, wrap it, then load its state")
        if not self.models or not all(model.is_sharded for model in self.models):
            raise ConfigError("DistributedOptimizer needs models made with use_distributed_optimizer=True")
        if any(getattr(model, "has_sharded_optimizer", False) for model in self.models):
            raise ConfigError("a model has a DistributedOptimizer already; make one with several parameter groups")
        ours = {id(p) for model in self.models for bucket in model.buckets for p in bucket.parameters}
        foreign = sum(
            p.requires_grad and id(p) not in ours for group in self.optimizer.param_groups for p in group["params"]
        )
        if foreign:
            raise ConfigError(f"{foreign} parameters of this {kind} are in none of the models; pass their models too")
        for model in self.models:
            model.has_sharded_optimizer = True


def _finish(buckets: tuple[ParameterBucket, ...]) -> None:
    for bucket in buckets:
        bucket.finish_gather()
