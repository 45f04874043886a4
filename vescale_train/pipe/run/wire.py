"""Messages between two stages: a list of tensors, announced by a header the first time that they have this form.

Both ends know from the form of the micro-batch whether they have met before, so later messages are tensors alone. A
tensor travels with its strides: the same memory order on both sides gives the same bits in what is computed next.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale_train.errors import InternalError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

Tensors = list[torch.Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What one tensor of a message looks like."""

    shape: tuple[int, ...]
    """Of this rank's part."""
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    axes: tuple[str, ...] = ()
    """For a DTensor: the names of its mesh's axes."""
    placements: tuple[str, ...] = ()
    global_shape: tuple[int, ...] = ()
    global_stride: tuple[int, ...] = ()


def form_of_tensor(tensor: torch.Tensor) -> Form:
    """Return the form under which a tensor travels: its own strides if it fills its memory, row-major otherwise."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    stride = local.stride() if fills_memory(local) else row_major(local.shape)
    form: dict[str, Any] = {
        "shape": tuple(local.shape),
        "stride": tuple(stride),
        "dtype": tensor.dtype,
        "needs_grad": tensor.requires_grad,
    }
    if isinstance(tensor, DTensor):
        form |= {
            "axes": tuple(tensor.device_mesh.mesh_dim_names or ()),
            "placements": tuple(_placement_text(placement) for placement in tensor.placements),
            "global_shape": tuple(tensor.shape),
            "global_stride": tuple(tensor.stride()),
        }
    return Form(**form)


def _placement_text(placement: Placement) -> str:
    match placement:
        case Replicate():
            return "R"
        case Partial():
            return f"P{placement.reduce_op}"
        case Shard() if type(placement) is Shard:
            return f"S{placement.dim}"
        case _:
            raise InvalidInputError(
                f"cannot send a tensor placed as {placement} to the next stage; redistribute it to Shard or Replicate"
            )


def _placement(text: str) -> Placement:
    if text.startswith("S"):
        return Shard(int(text[1:]))
    return Replicate() if text == "R" else Partial(text[1:])


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor that lies in memory row by row."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def fills_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie side by side, each once, in some order of its dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def encode(forms: Sequence[Form | None]) -> bytes:
    """Return a header's bytes."""
    records: list[dict[str, Any] | None] = []
    for form in forms:
        if form is None:
            records.append(None)
        else:
            record = {name: getattr(form, name) for name in Form.__slots__}
            records.append(record | {"dtype": str(form.dtype).removeprefix("torch.")})
    return json.dumps(records).encode()


def decode(data: bytes) -> list[Form | None]:
    """Return the forms that a header tells."""
    forms: list[Form | None] = []
    for record in json.loads(data):
        if record is None:
            forms.append(None)
        else:
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
            forms.append(Form(**fields | {"dtype": getattr(torch, record["dtype"])}))
    return forms


def flat(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """Return this rank's part of a tensor as one contiguous run in the memory order of its form."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    if tuple(local.stride()) != form.stride:
        ordered = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=local.device)
        local = ordered.copy_(local)
    return local.as_strided((local.numel(),), (1,))


def empty(form: Form, device: torch.device) -> torch.Tensor:
    """Return memory to receive one tensor into."""
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=device)


def arrived(buffer: torch.Tensor, form: Form, mesh: DeviceMesh | None) -> torch.Tensor:
    """Return a received tensor as what it was on the other side."""
    if not form.placements:
        return buffer
    if mesh is None or not set(form.axes) <= set(mesh.mesh_dim_names or ()):
        raise InternalError(f"a tensor over mesh axes {form.axes} arrived, but this stage's mesh is {mesh}")
    return DTensor.from_local(
        buffer,
        mesh[form.axes] if form.axes != mesh.mesh_dim_names else mesh,
        [_placement(text) for text in form.placements],
        run_check=False,
        shape=torch.Size(form.global_shape),
        stride=form.global_stride,
    )


class Wire:
    """One direction between this stage and a neighbour: what was agreed, and the operations to send and receive.

    ``send`` and ``receive`` are called in the same order on both sides, with the same keys.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup, device: torch.device, mesh: DeviceMesh | None) -> None:
        self.peer, self.group, self.device, self.mesh = peer, group, device, mesh
        self._agreed: dict[object, list[Form | None]] = {}

    def send(self, key: object, tensors: Tensors) -> list[dist.P2POp]:
        """Return what sends these tensors; None is left out, or sent as zeros where a tensor was agreed on."""
        forms = self._agreed.get(key)
        operations = []
        if forms is None:
            forms = [None if tensor is None else form_of_tensor(tensor) for tensor in tensors]
            self._agreed[key] = forms
            header = torch.frombuffer(bytearray(encode(forms)), dtype=torch.uint8).to(self.device)
            length = torch.tensor([header.numel()], dtype=torch.int64, device=self.device)
            operations += [self._operation(dist.isend, length), self._operation(dist.isend, header)]
        for place, (tensor, form) in enumerate(zip(tensors, forms, strict=True)):
            if form is None:
                if tensor is not None:
                    raise InvalidInputError(
                        f"cannot send tensor {place} to rank {self.peer}: it was None in the first micro-batch of this "
                        "form and is not in this one; let it be zeros then, or give stages by hand"
                    )
                continue
            whole = torch.zeros_like(empty(form, self.device)) if tensor is None else tensor
            run = flat(_like(whole, form), form)
            if run.numel():
                operations.append(self._operation(dist.isend, run))
        return operations

    def receive(self, key: object) -> tuple[list[dist.P2POp], list[Form | None], Tensors]:
        """Return what receives the tensors of this key, their forms, and the buffers; waits for a header if need be."""
        forms = self._agreed.get(key)
        if forms is None:
            length = torch.zeros(1, dtype=torch.int64, device=self.device)
            dist.recv(length, group=self.group, group_src=self.peer)
            header = torch.zeros(int(length.item()), dtype=torch.uint8, device=self.device)
            dist.recv(header, group=self.group, group_src=self.peer)
            forms = self._agreed[key] = decode(bytes(header.cpu().tolist()))
        buffers: Tensors = [None if form is None else empty(form, self.device) for form in forms]
        operations = [
            self._operation(dist.irecv, buffer.as_strided((buffer.numel(),), (1,)))
            for buffer in buffers
            if buffer is not None and buffer.numel()
        ]
        return operations, forms, buffers

    def _operation(self, kind: Any, tensor: torch.Tensor) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self.group, group_peer=self.peer)


def _like(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    local_shape = tuple(tensor.to_local().shape) if isinstance(tensor, DTensor) else tuple(tensor.shape)
    if local_shape != form.shape or tensor.dtype != form.dtype:
        raise InvalidInputError(
            f"cannot send a tensor of shape {local_shape} and {tensor.dtype}: micro-batches of this form had "
            f"{form.shape} and {form.dtype} before, and the receiver counts on it"
        )
    return tensor
