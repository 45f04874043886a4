"""Classic Megatron checkpoints: ``mp_rank_TT[_PPP]/model_optim_rng.pt``, one a model-parallel rank, merged.

Tensor-parallel ranks are put together by an explicit map (``partition``); pipeline stages by counting layers, for their
names count from 0 on every stage. Only the model is merged: optimizer states of these files are lists in an order that
nothing in them tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.interop.foreign.flatten import Flat, flatten, plain
from vescale_ckpt.interop.foreign.regions import fill_region
from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot, ForeignTensor
from vescale_ckpt.interop.megatron.allowed import MAKERS
from vescale_ckpt.interop.megatron.partition import Partition, merge_boxes, partition_of
from vescale_ckpt.interop.torchsave.archive import Archive
from vescale_ckpt.interop.torchsave.snapshot import is_stored_tensor
from vescale_ckpt.stage.raw import as_integers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.interop.foreign.files import Files
    from vescale_ckpt.interop.foreign.regions import Region

RANK_FILE: Final = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?/(model_optim_rng|model_rng)\.pt")
_COMMON: Final = (
    "args",
    "iteration",
    "checkpoint_version",
    "opt_param_scheduler",
    "num_floating_point_operations_so_far",
)
_LAYER: Final = re.compile(r"(.*\blayers\.)(\d+)(\..*)")


@dataclass(frozen=True, slots=True)
class _Held:
    """A rank's part of a tensor."""

    region: Region
    boxes: tuple[tuple[Box, Box], ...]
    """(box of the whole, box of the rank's own)."""


class MegatronRanksSnapshot(ForeignSnapshot):
    """The model of one iteration's folder, merged.

    Args:
        files: the folder with the ``mp_rank_*`` folders.
        partition: regular expression of names -> ``rows``, ``columns``, ``gated_rows`` or ``copied``, asked before the
            map of Megatron's own layers.

    Raises:
        FormatError: ranks are missing, nothing says how a tensor was cut, or a pickle asks for what is no data.
        CorruptionError, ObjectNotFoundError, StorageError: it is damaged or cannot be read.
    """

    format: ClassVar[str] = "megatron_ranks"

    def __init__(self, files: Files, partition: Mapping[str, str] | None = None) -> None:
        super().__init__(files)
        self._partition = dict(partition or {})
        self._tensors: dict[str, ForeignTensor] = {}
        self._held: dict[str, list[_Held]] = {}
        self._copied: set[str] = set()
        self._values: dict[str, Any] = {}
        self._notes: list[str] = []
        offset = 0
        for stage in self._stages():
            archives = [Archive(files, name, makers=MAKERS) for name in stage]
            flats = [self._model(archive) for archive in archives]
            if offset == 0 and not self._values:
                self._take_values(archives[0])
            offset += self._merge(archives, flats, offset)

    def _stages(self) -> list[list[str]]:
        """Return the files, by pipeline stage and then by tensor-parallel rank."""
        found: dict[tuple[int, int], str] = {}
        for name in self.files.names():
            match = RANK_FILE.fullmatch(name)
            if match:
                found[int(match[2] or 0), int(match[1])] = name
        stages = 1 + max((stage for stage, _ in found), default=-1)
        ranks = 1 + max((rank for _, rank in found), default=-1)
        missing = [(t, p) for p in range(stages) for t in range(ranks) if (p, t) not in found]
        if missing or not found:
            raise FormatError(
                f"cannot read {self.url}: it has {ranks} tensor-parallel ranks and {stages} stages, but no files of "
                f"(rank, stage) {missing[:8]}",
                path=self.url,
            )
        return [[found[stage, rank] for rank in range(ranks)] for stage in range(stages)]

    def _model(self, archive: Archive) -> Flat:
        value = archive.value
        if not isinstance(value, dict) or not any(key.startswith("model") for key in value if isinstance(key, str)):
            raise FormatError(f"cannot read {archive.what}: it has no model", path=self.url)
        if "model" not in value:
            raise FormatError(
                f"cannot read {archive.what}: its model is in interleaved chunks (model0, ...), whose layers are not "
                "in order; convert it without virtual stages",
                path=self.url,
            )
        return flatten(value["model"], is_stored_tensor, archive.what, archive.pickle_bytes)

    def _take_values(self, archive: Archive) -> None:
        value = archive.value
        for key in (
            "args",
            "iteration",
            "checkpoint_version",
            "opt_param_scheduler",
            "num_floating_point_operations_so_far",
        ):
            if key in value:
                self._values[key] = plain(value[key], archive.what, archive.pickle_bytes)
        rest = [str(key) for key in value if key not in {*self._values, "model"}]
        if rest:
            self._notes.append(f"left out, for each rank has its own: {', '.join(rest)}")

    def _merge(self, archives: list[Archive], flats: list[Flat], offset: int) -> int:
        """Add one stage's tensors; return how many layers it has."""
        names = list(flats[0].tensors)
        if any(set(flat.tensors) != set(names) for flat in flats):
            raise FormatError(f"cannot read {self.url}: the tensor-parallel ranks of a stage have different tensors")
        args = self._values.get("args")
        is_gated = bool(isinstance(args, dict) and (args.get("swiglu") or args.get("gated_linear_unit")))
        layers = 0
        for name in names:
            match = _LAYER.fullmatch(name)
            whole_name = name
            if match:
                layers = max(layers, int(match[2]) + 1)
                whole_name = f"{match[1]}{int(match[2]) + offset}{match[3]}"
            stored = [flat.tensors[name][1] for flat in flats]
            kind = partition_of(name, self._partition, is_gated=is_gated) if len(stored) > 1 else Partition.COPIED
            shape, boxes = merge_boxes(kind, [tensor.shape for tensor in stored], name)
            if len({tensor.dtype for tensor in stored}) > 1:
                raise FormatError(f"cannot merge {name!r}: the ranks have different dtypes", fqn=name)
            if kind is Partition.COPIED:
                self._copied.add(whole_name)
            if whole_name in self._tensors:
                self._check_again(whole_name, shape)
            self._tensors.setdefault(whole_name, ForeignTensor(whole_name, stored[0].dtype, shape))
            self._held.setdefault(
                whole_name,
                [
                    _Held(archive.region(tensor), tuple(mine))
                    for archive, tensor, mine in zip(archives, stored, boxes, strict=True)
                ],
            )
        return layers

    def _check_again(self, name: str, shape: tuple[int, ...]) -> None:
        """A tensor that two stages have is the embedding, which the last stage keeps as its head; the first counts."""
        if self._tensors[name].shape != shape:
            raise FormatError(f"cannot read {self.url}: two stages have {name!r} with different shapes", fqn=name)
        self._notes.append(f"{name}: on two stages, the first one's is taken")

    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""
        return self._tensors

    @property
    def values(self) -> Mapping[str, Any]:
        """The arguments, the iteration and what else all ranks have in common."""
        return self._values

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out."""
        return tuple(self._notes)

    def _fill(self, tensor: ForeignTensor, box: Box, out: torch.Tensor) -> None:
        held = self._held[tensor.name]
        is_copied = tensor.name in self._copied
        for part in held[:1] if is_copied else held:
            for whole, own in part.boxes:
                common = whole.intersect(box)
                if common is not None:
                    inside = common.relative_to(whole).shifted(own.offset)
                    fill_region(self.files, part.region, inside, out[common.relative_to(box).slices])
        if is_copied:
            self._compare(tensor, held[1:], box, out)

    def _compare(self, tensor: ForeignTensor, others: list[_Held], box: Box, out: torch.Tensor) -> None:
        """Refuse copies that differ: nobody could tell which one is right."""
        for rank, part in enumerate(others, 1):
            copy = torch.empty_like(out)
            fill_region(self.files, part.region, box, copy)
            if not torch.equal(as_integers(copy), as_integers(out)):
                raise CorruptionError(
                    f"cannot merge {tensor.name!r} of {self.url}: ranks 0 and {rank} should have copies of it and have "
                    "different values; pass partition= if it was cut",
                    fqn=tensor.name,
                )
