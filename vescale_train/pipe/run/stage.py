"""One stage under torch's runtime: receive, run its part of the model, send, and differentiate it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vescale_train.errors import InternalError
from vescale_train.pipe.run.torch_stage import StageBase
from vescale_train.pipe.run.wire import Wire, arrived

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import nn

    from vescale_train.pipe.place import Place
    from vescale_train.pipe.run.units import UnitGradients
    from vescale_train.pipe.run.wire import Form, Tensors


class Work(Protocol):
    """What the engine knows about the step that is being run."""

    def forward(self, stage: int, module: nn.Module, microbatch: int, received: Sequence[torch.Tensor]) -> Forwarded:
        """Run a stage's part of one micro-batch."""

    def key(self, microbatch: int) -> object:
        """Return what is equal for micro-batches whose tensors look alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forwarded:
    """What came out of a stage's forward."""

    sent: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None = None
    """On the last stage: what is differentiated, already weighted."""


@dataclass(kw_only=True, slots=True)
class _Graph:
    """What is kept of a forward until its backward."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    gradients: Tensors
    groups: Any = None


class _Same(torch.autograd.Function):
    """The same memory under a new node: torch detaches outputs in place when it has differentiated for inputs.

    An output that is a view, an input handed on, or saved for the weights' part of the backward must not be touched.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradients[0]


class RunningStage(StageBase):
    """A stage as torch's runtime drives it."""

    def __init__(
        self,
        module: nn.Module,
        *,
        index: int,
        num_stages: int,
        ranks: dict[int, int],
        place: Place,
        device: torch.device,
        units: UnitGradients,
        on_reduce: Callable[[int], None],
    ) -> None:
        group = place.group
        if group is None:
            raise InternalError("a running stage needs a process group, if only of itself")
        super().__init__(module, index=index, num_stages=num_stages, device=device, group=group)
        self.work: Work | None = None
        self.units, self.on_reduce = units, on_reduce
        self._mesh = place.mesh
        self._wires = {
            (other, what): Wire(ranks[other], group, device, place.mesh)
            for other in (index - 1, index + 1)
            if other in ranks
            for what in ("activations", "gradients")
        }
        self.clear_runtime_states()

    def clear_runtime_states(self) -> None:
        """Forget everything of the step before."""
        self._arriving: dict[int, tuple[Tensors, list[Form | None]]] = {}
        self._arriving_gradients: dict[int, tuple[Tensors, list[Form | None]]] = {}
        self._received: dict[int, list[torch.Tensor]] = {}
        self._received_gradients: dict[int, Tensors] = {}
        self._graphs: dict[int, _Graph] = {}
        self._outputs: dict[int, tuple[torch.Tensor, ...]] = {}
        self._input_gradients: dict[int, Tensors] = {}
        self._losses: dict[int, torch.Tensor] = {}

    @property
    def now(self) -> Work:
        """The step that is being run."""
        if self.work is None:
            raise InternalError("a stage was run outside a step")
        return self.work

    def loss_of(self, microbatch: int) -> torch.Tensor | None:
        """Return the loss of a micro-batch, None if the model has none."""
        return self._losses.get(microbatch)

    # What torch's runtime asks for, in its words -----------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Start to receive activations."""
        operations, forms, buffers = self._wire(-1, "activations").receive(self.now.key(fwd_chunk_id))
        self._arriving[fwd_chunk_id] = buffers, forms
        return operations

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Start to receive gradients."""
        operations, forms, buffers = self._wire(1, "gradients").receive(self.now.key(bwd_chunk_id))
        self._arriving_gradients[bwd_chunk_id] = buffers, forms
        return operations

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Start to send activations."""
        return self._wire(1, "activations").send(self.now.key(fwd_chunk_id), list(self._outputs.pop(fwd_chunk_id)))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Start to send gradients."""
        return self._wire(-1, "gradients").send(self.now.key(bwd_chunk_id), self._input_gradients.pop(bwd_chunk_id))

    def _wire(self, distance: int, what: str) -> Wire:
        return self._wires[self.stage_index + distance, what]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take activations from a stage on this rank."""
        self._received[mb_index] = list(prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Give gradients to a stage on this rank."""
        return self._input_gradients.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take gradients from a stage on this rank."""
        self._received_gradients[mb_index] = next_stage_bwd_outputs

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],  # noqa: ARG002 - the engine has the inputs
        kwargs: dict[str, Any] | None = None,  # noqa: ARG002
        save_forward_output: bool = True,  # noqa: ARG002 - torch's signature
    ) -> tuple[torch.Tensor, ...]:
        """Run the stage's part of a micro-batch."""
        inputs = self._inputs(fwd_chunk_id)
        done = self.now.forward(self.stage_index, self.submod, fwd_chunk_id, inputs)
        if done.loss is not None:
            self._losses[fwd_chunk_id] = done.loss
        self._outputs[fwd_chunk_id] = done.sent
        if self.has_backward:
            outputs = list(done.sent) if done.loss is None else [done.loss]
            self._graphs[fwd_chunk_id] = _Graph(inputs=inputs, outputs=outputs, gradients=[])
        return done.sent

    def _inputs(self, microbatch: int) -> list[torch.Tensor]:
        """Return what came from the stage before, as leaves that gather gradients."""
        wants_grad = self.has_backward and torch.is_grad_enabled()
        if microbatch in self._received:
            local = self._received.pop(microbatch)
            return [tensor.detach().requires_grad_(wants_grad and tensor.requires_grad) for tensor in local]
        buffers, forms = self._arriving.pop(microbatch, ([], []))
        inputs = []
        for buffer, form in zip(buffers, forms, strict=True):
            if buffer is None or form is None:
                raise InternalError("an activation arrived as None")
            inputs.append(arrived(buffer, form, self._mesh).requires_grad_(wants_grad and form.needs_grad))
        return inputs

    def _output_gradients(self, microbatch: int) -> Tensors:
        if self.is_last:
            return [None]
        if microbatch in self._received_gradients:
            return self._received_gradients.pop(microbatch)
        buffers, forms = self._arriving_gradients.pop(microbatch)
        return [
            None if buffer is None or form is None else arrived(buffer, form, self._mesh)
            for buffer, form in zip(buffers, forms, strict=True)
        ]

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,  # noqa: ARG002 - kept with the graph
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Differentiate a micro-batch, whole or for its inputs only."""
        graph = self._graphs[bwd_chunk_id]
        graph.gradients = self._output_gradients(bwd_chunk_id)
        kept = [
            (output, gradient)
            for output, gradient in zip(graph.outputs, graph.gradients, strict=True)
            if output.requires_grad and (gradient is not None or self.is_last)
        ]
        graph.outputs, graph.gradients = [o for o, _ in kept], [g for _, g in kept]
        gradients: Tensors = [None] * len(graph.inputs)
        if full_backward:
            gradients = self._whole(self._graphs.pop(bwd_chunk_id), bwd_chunk_id, last=last_backward)
        elif self._can_split(graph):
            gradients, graph.groups = self._for_inputs(graph)
        self._input_gradients[bwd_chunk_id] = gradients

    def _can_split(self, graph: _Graph) -> bool:
        """Without an input to differentiate for, torch would find no weights either; all is then done by W."""
        return bool(graph.outputs) and any(tensor.requires_grad for tensor in graph.inputs)

    def _whole(self, graph: _Graph, microbatch: int, *, last: bool) -> Tensors:
        if not graph.outputs:
            return [None] * len(graph.inputs)
        arguments = {
            "stage_output": tuple(graph.outputs),
            "output_grads": tuple(graph.gradients),
            "input_values": graph.inputs,
        }
        with self.units.of(self.stage_index, microbatch):
            gradients, _ = self.differentiate("full", arguments, last=last)
        return list(gradients)

    def _for_inputs(self, graph: _Graph) -> tuple[Tensors, Any]:
        outputs = [_Same.apply(output) for output in graph.outputs]  # type: ignore[no-untyped-call]
        graph.outputs = outputs
        arguments = {
            "stage_output": tuple(outputs),
            "output_grads": None if self.is_last else tuple(graph.gradients),
            "input_values": graph.inputs,
        }
        gradients, groups = self.differentiate("input", arguments, last=False)
        for tensor in graph.inputs:
            tensor.grad = None
        return list(gradients), groups

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Differentiate a micro-batch for its weights, after it was for its inputs."""
        graph = self._graphs.pop(bwd_chunk_id)
        if graph.groups is None:
            self._whole(graph, bwd_chunk_id, last=last_backward)
            return
        with self.units.of(self.stage_index, bwd_chunk_id):
            self.differentiate("weight", {"param_groups": graph.groups, "stage_output": None}, last=last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:  # noqa: ARG002 - losses are weighted instead
        """Hand the stage's gradients to whoever reduces them."""
        self.units.fold(self.stage_index)
        self.reduce_wrapped()
        self.on_reduce(self.stage_index)
