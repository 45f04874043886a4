"""Data parallelism: gradients in flat buckets, each reduced while backward still makes the next ones.

Hooks stand on the parameters, so the module itself may be called, wrapped or not. A parameter that is tied counts once,
one that is frozen not at all, and one that no rank used has no gradient, as on one device.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from vescale_train.ddp.bucket import Bucket, BucketKind, make_buckets
from vescale_train.ddp.check import check_equal_start
from vescale_train.ddp.collectives import group_size
from vescale_train.ddp.group import data_group
from vescale_train.ddp.local import like_parameter, local_gradient, local_of
from vescale_train.ddp.options import DDPOptions
from vescale_train.errors import ConfigError, InternalError, StateError
from vescale_train.torch_private import on_backward_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.device_mesh import DeviceMesh


_MARK = "_vescale_data_parallel"
"""On a parameter whose gradient goes to a bucket."""


@dataclass(slots=True)
class _Step:
    """What is known of the step under way."""

    next_bucket: int = 0
    """The one that is reduced next."""
    num_passes: int = 0
    in_backward: bool = False
    is_reduced: bool = False
    touched: set[int] = field(default_factory=set)
    """Ids of the parameters that got a gradient on this rank."""
    used: torch.Tensor | None = None
    """Per parameter, in the order of the buckets, whether any rank used it."""
    used_work: dist.Work | None = None


class DistributedDataParallel(nn.Module):
    """Sums the gradients of a module over the ranks that see different data.

    Args:
        module: its parameters must be equal on all ranks; tensor-parallel ``DTensor`` parameters are welcome.
        mesh: see ``data_group``.
        accumulate_allreduce_grads_in_fp32: add up and reduce in float32, whatever the dtype of a parameter.
        overlap_grad_reduce: reduce a bucket as soon as it is complete, while backward goes on.
        use_distributed_optimizer: each rank needs the gradients of its share only; ``DistributedOptimizer`` must then
            be the one that steps, and ``parameter.grad`` stays None.
        bucket_size: elements at which a bucket is closed; None makes one bucket for each dtype.
        options: the rest.

    Raises:
        ConfigError: nothing to train, a module that is wrapped already, or options that contradict each other.
        InvalidInputError: parameters differ between ranks.
    """

    checkpoint_wraps: ClassVar[str] = "module"
    """A checkpoint names what is inside, not this wrapper."""

    _is_syncing: bool

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
        accumulate_allreduce_grads_in_fp32: bool = False,
        overlap_grad_reduce: bool = True,
        use_distributed_optimizer: bool = False,
        *,
        bucket_size: int | None = 40_000_000,
        options: DDPOptions | None = None,
    ) -> None:
        super().__init__()
        options = options or DDPOptions()
        options.check(is_sharded=use_distributed_optimizer)
        self._begin(module, mesh, options)
        self.is_sharded = use_distributed_optimizer
        self._overlap = overlap_grad_reduce and not options.exact
        trained = self._trained()
        if options.check_parameters:
            check_equal_start(trained, self.group)
        kind = BucketKind(
            group=self.group,
            dtype=torch.float32 if accumulate_allreduce_grads_in_fp32 else None,
            shard=use_distributed_optimizer,
            release=options.shard_gradients and not options.exact,
            exact=options.exact,
        )
        self.buckets = make_buckets(list(trained.values()), kind, bucket_size)
        """In the order in which they are reduced."""
        self._places = {id(p): (b, n) for b in self.buckets for n, p in enumerate(b.parameters)}
        self._handles = [_hook(parameter, self._take) for parameter in trained.values()]

    @property
    def num_ranks(self) -> int:
        """How many ranks see different data."""
        return group_size(self.group)

    @property
    def is_reduced(self) -> bool:
        """Whether ``finish_grad_sync`` has been called since the last ``zero_grad_buffer``."""
        return self._step.is_reduced

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def unwrap(self) -> nn.Module:
        """Return the module without data parallelism; this object is of no use afterwards."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                del parameter.__dict__[_MARK]
        for handle in self._handles:
            handle.remove()
        return self.module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's own state."""
        return self.module.load_state_dict(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up gradients in here: for every backward pass of a step but the last."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def start_grad_sync(self) -> None:
        """Start to reduce every bucket that is not under way yet; on all ranks."""
        if self._step.is_reduced:
            raise StateError("the gradients are reduced already; call zero_grad_buffer() before the next step")
        while self._step.next_bucket < len(self.buckets):
            self._launch()
        if self.options.find_unused and self.num_ranks > 1 and self._step.used is None:
            self._step.used = self._own_used()
            self._step.used_work = dist.all_reduce(self._step.used, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def finish_grad_sync(self) -> None:
        """Wait until all gradients are reduced; on all ranks. Then ``parameter.grad`` holds them, if not sharded.

        Raises:
            StateError: a parameter began to require a gradient after this was made.
        """
        if self._step.is_reduced:
            return
        self._refuse_thawed()
        self.start_grad_sync()
        for bucket in self.buckets:
            bucket.finish()
        if self._step.used_work is not None:
            self._step.used_work.wait()
            self._step.used_work = None
        self._step.is_reduced = True
        if not self.is_sharded:
            for bucket in self.buckets:
                self._show(bucket)

    def zero_grad_buffer(self) -> None:
        """Forget all gradients, for the next step."""
        for bucket in self.buckets:
            bucket.zero()
            for parameter in bucket.parameters:
                parameter.grad = None
        self._step = _Step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, as ``zero_grad_buffer`` does; they are None afterwards, whatever the argument."""
        if not set_to_none:
            raise ConfigError("gradients live in a flat buffer and are None until they are reduced; drop set_to_none")
        self.zero_grad_buffer()

    def unused(self) -> frozenset[int]:
        """Return the ids of the parameters that no rank used since the last ``zero_grad_buffer``."""
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        if not self.options.find_unused or len(self._step.touched) == len(parameters):
            return frozenset()
        used = self._own_used() if self._step.used is None else self._step.used
        return frozenset(id(p) for p, is_used in zip(parameters, used.tolist(), strict=True) if not is_used)

    def _begin(self, module: nn.Module, mesh: DeviceMesh | dist.ProcessGroup | None, options: DDPOptions) -> None:
        """Set what does not depend on how gradients are reduced."""
        self.module = module
        self.group = data_group(mesh)
        self.options = options
        self.mean_over = options.mean_over or ("passes" if options.exact else "ranks")
        self.is_sharded = False
        self.has_sharded_optimizer = False
        self.num_micro_batches: int | None = None
        """Backward passes in a step, over all ranks; None: every rank makes as many. In exact mode a rank that knows
        needs less memory, and ranks may make unequal numbers."""
        self._step = _Step()
        self._is_syncing = True

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that require a gradient, by name."""
        found = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not found:
            raise ConfigError(f"cannot train {type(self.module).__name__}: none of its parameters requires a gradient")
        return found

    def _take(self, parameter: torch.Tensor) -> None:
        """Take a gradient from autograd: it is called when all of it has come."""
        bucket, number = self._places[id(parameter)]
        if bucket.launched or self._step.is_reduced:
            raise StateError(
                "a gradient came after its bucket was reduced; run all backward passes of a step but the last inside "
                "no_sync(), and call zero_grad_buffer() after each step"
            )
        if not self._step.in_backward:
            self._step.in_backward = True
            on_backward_end(self._end_backward)
        gradient = parameter.grad
        if gradient is None:
            raise InternalError("autograd said that a gradient has come, and there is none")
        bucket.add(number, local_gradient(parameter, gradient))
        parameter.grad = None
        self._step.touched.add(id(parameter))
        if self._overlap and self._is_syncing:
            # in one order on all ranks, whatever the order in which they complete here
            while self._step.next_bucket < len(self.buckets) and self.buckets[self._step.next_bucket].is_complete:
                self._launch()

    def _end_backward(self) -> None:
        self._step.in_backward = False
        self._step.num_passes += 1
        for bucket in self.buckets:
            bucket.end_backward(self.num_micro_batches)
        if self._overlap and self._is_syncing:
            self.start_grad_sync()  # what waits for parameters that this pass did not use

    def _launch(self) -> None:
        self.buckets[self._step.next_bucket].start(self._divisor(), self.num_micro_batches)
        self._step.next_bucket += 1

    def _divisor(self) -> int:
        match self.mean_over:
            case "ranks":
                return self.num_ranks
            case "passes":
                passes = self.num_ranks * max(self._step.num_passes + self._step.in_backward, 1)
                return self.num_micro_batches or passes
            case _:
                return 1

    def _own_used(self) -> torch.Tensor:
        flags = [id(p) in self._step.touched for bucket in self.buckets for p in bucket.parameters]
        return torch.tensor(flags, dtype=torch.int32, device=local_of(self.buckets[0].parameters[0]).device)

    def _show(self, bucket: Bucket) -> None:
        unused = self.unused()
        for number, parameter in enumerate(bucket.parameters):
            gradient = bucket.gradient(number).to(parameter.dtype)
            parameter.grad = None if id(parameter) in unused else like_parameter(parameter, gradient)

    def _refuse_thawed(self) -> None:
        thawed = [n for n, p in self.module.named_parameters() if p.requires_grad and id(p) not in self._places]
        if thawed:
            raise StateError(
                f"{len(thawed)} parameters require a gradient now that did not when data parallelism was set up "
                f"({', '.join(thawed[:5])}); their gradients would not be summed; set it up again"
            )


def _hook(parameter: torch.Tensor, take: Callable[[torch.Tensor], None]) -> Any:
    """Call back when all of a parameter's gradient has come; return the handle that ends this."""
    if _MARK in parameter.__dict__:
        raise ConfigError("a parameter is in another DistributedDataParallel already; unwrap() that one first")
    parameter.__dict__[_MARK] = True
    register: Any = parameter.register_post_accumulate_grad_hook
    return register(take)
