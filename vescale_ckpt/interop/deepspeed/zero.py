"""ZeRO checkpoints of DeepSpeed as snapshots: fp32 masters and moments by parameter, from every rank's partitions.

``model.<name>`` is the fp32 master where there is one, and what the module stored (frozen parameters, buffers) where
there is none; ``optimizer.<moment>.<name>`` are the moments. The 16-bit copies of parameters that have masters are not
shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.flat import flat_to_boxes
from vescale_ckpt.interop.deepspeed.allowed import MAKERS
from vescale_ckpt.interop.deepspeed.flat import Segment, segments_stage_2, segments_stage_3
from vescale_ckpt.interop.foreign.regions import Chunk, Region, check_region, row_major
from vescale_ckpt.interop.foreign.snapshot import ForeignTensor, RegionSnapshot
from vescale_ckpt.interop.torchsave.allowed import StoredTensor
from vescale_ckpt.interop.torchsave.archive import Archive

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vescale_ckpt.interop.foreign.files import Files

OPTIMIZER_FILE: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


class ZeroSnapshot(RegionSnapshot):
    """One step's folder (``global_step10``), of ZeRO stage 1, 2 or 3, without tensor or pipeline parallelism.

    Raises:
        FormatError: ranks are missing, or it was written with model parallelism, or a pickle asks for what is no data.
        CorruptionError: partitions and parameters do not fit.
        ObjectNotFoundError, StorageError: it cannot be read.
    """

    format: ClassVar[str] = "deepspeed_zero"

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        models, optimizers = self._names(_MODEL_FILE), self._names(OPTIMIZER_FILE)
        self._archives = [Archive(files, name, makers=MAKERS) for name in optimizers]
        self._models = [Archive(files, name, makers=MAKERS) for name in models]
        states = [_dict(archive.value, "optimizer_state_dict", archive.what) for archive in self._archives]
        self._tensors: dict[str, ForeignTensor] = {}
        self._places: dict[str, list[Chunk]] = {}
        stage = states[0].get("zero_stage")
        self.stage = stage if type(stage) is int else int(getattr(stage, "args", (0,))[0])
        """1, 2 or 3."""
        counts = states[0].get("partition_count", len(states))
        wanted = max(counts) if isinstance(counts, list | tuple) and counts else counts
        if self.stage not in {1, 2, 3} or wanted != len(states):
            raise FormatError(
                f"cannot read {self.url}: stage {self.stage} of {wanted} ranks; there are files of {len(states)}"
            )
        self._add_flat(states)
        self._add_module()
        keys = ("ds_version", "ds_config", "global_steps", "global_samples", "dp_world_size", "skipped_steps")
        first = self._models[0].value
        self._values = {key: first[key] for key in keys if isinstance(first.get(key), str | int | float | bool)}

    def _names(self, pattern: re.Pattern[str]) -> list[str]:
        """Return the files of all ranks, in order."""
        found: dict[int, str] = {}
        for name in self.files.names():
            match = pattern.fullmatch(name)
            if match is None:
                continue
            if int(match[2]) != 0:
                raise FormatError(
                    f"cannot read {self.url}: {name!r} is of a model-parallel rank, and nothing says how its tensors "
                    "were cut; convert it to a universal checkpoint with DeepSpeed",
                    path=name,
                )
            found[int(match[1] or 0)] = name
        if not found or set(found) != set(range(len(found))):
            raise FormatError(
                f"cannot read {self.url}: of the files {pattern.pattern} it has the ranks {sorted(found)}"
            )
        return [found[rank] for rank in range(len(found))]

    # ---- masters and moments

    def _add_flat(self, states: Sequence[Mapping[Any, Any]]) -> None:
        groups = self._shapes()
        if self.stage == 3:
            shapes = {name: shape for group in groups for name, shape in group.items()}
            self._add_stage_3(states, shapes)
            return
        flats = [_list(state, "single_partition_of_fp32_groups", self.url) for state in states]
        for number, shapes in enumerate(groups):
            parts = [flat[number] if number < len(flat) else None for flat in flats]
            self._add_group("model", shapes, [[part] for part in parts], segments_stage_2)
            for moment in _moments(states[0], number):
                moments = [_moment(state, number, moment) for state in states]
                self._add_group(f"optimizer.{moment}", shapes, [[part] for part in moments], segments_stage_2)

    def _add_stage_3(self, states: Sequence[Mapping[Any, Any]], shapes: Mapping[str, tuple[int, ...]]) -> None:
        flats = [_list(state, "fp32_flat_groups", self.url) for state in states]
        self._add_group("model", shapes, flats, segments_stage_3)
        inner = [_dict(state, "optimizer_state_dict", self.url) for state in states]
        for moment in _moments({"base_optimizer_state": inner[0]}, 0):
            parts = [
                [_moment({"base_optimizer_state": state}, number, moment) for number in range(len(flats[rank]))]
                for rank, state in enumerate(inner)
            ]
            self._add_group(f"optimizer.{moment}", shapes, parts, segments_stage_3)

    def _shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Return name -> shape of every group's parameters, in the order of its buffer."""
        listed = self._models[0].value.get("param_shapes")
        listed = listed if isinstance(listed, list) else [listed]
        groups = []
        for group in listed:
            if not isinstance(group, dict) or not all(isinstance(shape, tuple) for shape in group.values()):
                raise FormatError(
                    f"cannot read {self.url}: it does not say the shapes of its parameters (param_shapes)"
                )
            groups.append({str(name): tuple(shape) for name, shape in group.items()})
        return groups

    def _add_group(
        self, prefix: str, shapes: Mapping[str, tuple[int, ...]], parts: Sequence[Sequence[Any]], cut: Any
    ) -> None:
        """Add tensors that lie in flat buffers, of which a rank may have several, one after another."""
        buffers = [[_flat(part, self.url) for part in mine] for mine in parts]
        lengths = [sum(part.shape[0] for part in mine) for mine in buffers]
        dtypes = {part.dtype for mine in buffers for part in mine}
        if len(dtypes) != 1:
            raise CorruptionError(f"cannot read {self.url}: the buffers of {prefix} have the dtypes {dtypes}")
        (dtype,) = dtypes
        for name, segments in cut(shapes, lengths, f"{prefix} of {self.url}").items():
            full = f"{prefix}.{name}"
            self._tensors[full] = ForeignTensor(full, dtype, shapes[name], None, (*prefix.split("."), name))
            self._places[full] = [
                Chunk(box, partial(self._region, rank, buffer, offset, box))
                for rank, buffer, start, stop, offset in _split(segments, buffers)
                for box, offset in _boxes(shapes[name], start, stop, offset)
            ]

    def _region(self, rank: int, buffer: StoredTensor, offset: int, box: Box) -> Region:
        archive = self._archives[rank]
        whole = archive.region(buffer)
        item = buffer.dtype.itemsize
        start = whole.offset + offset * item
        region = Region(whole.file, start, buffer.dtype, box.shape, row_major(box.shape), whole.big_endian)
        return check_region(region, whole.offset, whole.offset + buffer.shape[0] * item, archive.what)

    # ---- what has no master

    def _add_module(self) -> None:
        """Add what the module stored of what no optimizer has: frozen parameters and buffers."""
        first = self._models[0]
        module = first.value.get("module")
        shared = first.value.get("shared_params")
        for name, tensor in module.items() if isinstance(module, dict) else ():
            full = f"model.{name}"
            if not isinstance(tensor, StoredTensor) or full in self._tensors or name in (shared or ()):
                continue
            region = first.region(tensor)
            self._tensors[full] = ForeignTensor(full, tensor.dtype, tensor.shape, None, ("model", str(name)))
            self._places[full] = [Chunk(Box.whole(tensor.shape), lambda region=region: region)]  # type: ignore[misc]
        self._add_frozen(first)
        for name, owner in shared.items() if isinstance(shared, dict) else ():
            tensor = self._tensors.get(f"model.{owner}")
            if tensor is not None:
                full = f"model.{name}"
                self._tensors[full] = ForeignTensor(full, tensor.dtype, tensor.shape, tensor.name, ("model", str(name)))

    def _add_frozen(self, first: Archive) -> None:
        """Refuse frozen parameters that stage 3 left empty, or whose parts are not put together here."""
        frozen = first.value.get("frozen_param_shapes")
        for name, shape in frozen.items() if isinstance(frozen, dict) else ():
            found = self._tensors.get(f"model.{name}")
            if found is not None and found.shape == tuple(shape):
                continue
            fragments = [archive.value.get("frozen_param_fragments") for archive in self._models]
            parts = [part.get(name) if isinstance(part, dict) else None for part in fragments]
            flat = [part for part in parts if isinstance(part, StoredTensor)]
            if len(flat) != len(self._models):
                raise CorruptionError(
                    f"cannot read {self.url}: the frozen {str(name)[:80]!r} is not whole", fqn=str(name)
                )
            self._add_fragments(str(name), tuple(shape), flat)

    def _add_fragments(self, name: str, shape: tuple[int, ...], parts: Sequence[StoredTensor]) -> None:
        full = f"model.{name}"
        lengths = [_flat(part, self.url).shape[0] for part in parts]
        segments = segments_stage_3({name: shape}, lengths, f"{full} of {self.url}")[name]
        self._tensors[full] = ForeignTensor(full, parts[0].dtype, shape, None, ("model", name))
        self._places[full] = [
            Chunk(box, partial(self._frozen_region, segment.rank, parts[segment.rank], offset, box))
            for segment in segments
            for box, offset in _boxes(shape, segment.start, segment.stop, 0)
        ]

    def _frozen_region(self, rank: int, part: StoredTensor, offset: int, box: Box) -> Region:
        whole = self._models[rank].region(part)
        start = whole.offset + offset * part.dtype.itemsize
        region = Region(whole.file, start, part.dtype, box.shape, row_major(box.shape), whole.big_endian)
        return check_region(region, whole.offset, whole.offset + whole.span_bytes, self._models[rank].what)

    # ---- the interface

    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""
        return self._tensors

    @property
    def values(self) -> Mapping[str, Any]:
        """Counters and versions."""
        return self._values

    def _chunks(self, tensor: ForeignTensor) -> Sequence[Chunk]:
        return self._places[tensor.name]


def _dict(value: Any, key: str, what: str) -> Mapping[Any, Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, Mapping):
        raise FormatError(f"cannot read {what}: it has no {key}")
    return found


def _list(value: Mapping[Any, Any], key: str, what: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list | tuple) or not found:
        raise FormatError(f"cannot read {what}: it has no {key}")
    return list(found)


def _flat(part: Any, what: str) -> StoredTensor:
    if not isinstance(part, StoredTensor) or len(part.shape) != 1:
        raise FormatError(f"cannot read {what}: a flat buffer is no tensor of one dim")
    return part


def _state_of(state: Mapping[Any, Any], number: int) -> Mapping[Any, Any]:
    """Return the optimizer's state of one group; it is a dict by number, or a list."""
    base = state.get("base_optimizer_state")
    inner = base.get("state", base) if isinstance(base, dict) else base
    found = (
        inner.get(number)
        if isinstance(inner, dict)
        else inner[number]
        if isinstance(inner, list) and number < len(inner)
        else None
    )
    return found if isinstance(found, Mapping) else {}


def _moments(state: Mapping[Any, Any], number: int) -> list[str]:
    found = _state_of(state, number)
    return [str(key) for key, value in found.items() if isinstance(value, StoredTensor) and len(value.shape) == 1]


def _moment(state: Mapping[Any, Any], number: int, moment: str) -> Any:
    return _state_of(state, number).get(moment)


def _split(
    segments: Sequence[Segment], buffers: Sequence[Sequence[StoredTensor]]
) -> Iterator[tuple[int, StoredTensor, int, int, int]]:
    """Yield (rank, buffer, start, stop, offset in the buffer): segments cut where a rank's buffers end."""
    for segment in segments:
        at = 0
        for buffer in buffers[segment.rank]:
            length = buffer.shape[0]
            lo = max(segment.offset, at)
            hi = min(segment.offset + segment.stop - segment.start, at + length)
            if lo < hi:
                start = segment.start + lo - segment.offset
                yield segment.rank, buffer, start, start + hi - lo, lo - at
            at += length


def _boxes(shape: tuple[int, ...], start: int, stop: int, offset: int) -> Iterator[tuple[Box, int]]:
    """Yield (box, offset in the buffer) of a flat range."""
    for box in flat_to_boxes(shape, start, stop):
        yield box, offset
        offset += box.volume
