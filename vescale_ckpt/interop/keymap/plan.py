"""What a key map makes of a checkpoint's tensors: for every target tensor, which boxes of which source tensors.

Pure: names, shapes and dtypes in, pieces out. Renaming, fusing, splitting, regrouping and cutting padding off are all
the same thing then, and any box of a target can be read without reading the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import MismatchError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.foreign.snapshot import ForeignTensor
from vescale_ckpt.interop.keymap.rules import KeyMap, Operand, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@dataclass(frozen=True, slots=True)
class MappedPiece:
    """A box of a target tensor and where it comes from."""

    box: Box
    source: str
    offset: tuple[int, ...]
    """Of the box in the source tensor, in the source's own dims."""
    transposed: bool

    def turned(self) -> MappedPiece:
        """Return the piece of the transposed target."""
        box = Box(self.box.offset[::-1], self.box.shape[::-1])
        return MappedPiece(box, self.source, self.offset, not self.transposed)

    def source_box(self, wanted: Box) -> Box:
        """Return the source's box of a part of this piece, which is in the target's coordinates."""
        inside = wanted.relative_to(self.box)
        offset, shape = inside.offset, inside.shape
        if self.transposed:
            offset, shape = offset[::-1], shape[::-1]
        return Box(tuple(a + b for a, b in zip(self.offset, offset, strict=True)), shape)


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A target tensor."""

    tensor: ForeignTensor
    stored: torch.dtype
    """Of the source; another than the tensor's own where it is cast."""
    pieces: tuple[MappedPiece, ...]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a source tensor, seen through a transposition."""

    source: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool

    def piece(self, row: int, start: int, count: int) -> MappedPiece:
        """Return the piece that puts ``count`` of these rows, from ``start`` on, at a row of the target."""
        zeros = (0,) * (len(self.shape) - 1)
        offset = (self.start + start, *zeros)
        box = Box((row, *zeros), (count, *self.shape[1:]))
        return MappedPiece(box, self.source, offset[::-1] if self.transposed else offset, self.transposed)


class _Planner:
    def __init__(self, keymap: KeyMap, tensors: Mapping[str, ForeignTensor], settings: Mapping[str, int]) -> None:
        self._keymap = keymap
        self._tensors = tensors
        self._settings = settings
        self.problems: list[str] = []
        self._parts: dict[str, dict[tuple[int, int], tuple[list[tuple[_Rows, int, int]], bool]]] = {}
        self._taken: set[str] = set()

    def apply(self) -> dict[str, MappedTensor]:
        """Return every target tensor."""
        for rule in self._keymap.rules:
            self._apply_regex(rule) if rule.regex else self._apply_rule(rule)
        for name, tensor in self._tensors.items():
            if name in self._taken:
                continue
            if self._keymap.unmatched == "keep":
                self._put(Operand(name), name, [(self._rows(tensor, transpose=False), 0, -1)], transposed=False)
            elif self._keymap.unmatched == "error":
                self.problems.append(f"no rule speaks of {name!r}")
        made = {name: mapped for name in self._parts if (mapped := self._assemble(name)) is not None}
        return _tied(made)

    def _apply_regex(self, rule: Rule) -> None:
        pattern = re.compile(rule.regex)
        for name, tensor in self._tensors.items():
            match = pattern.fullmatch(name)
            if match is None or name in self._taken:
                continue
            self._taken.add(name)
            for target in rule.targets:
                to = match.expand(target.pattern)
                self._put(Operand(to), to, [(self._rows(tensor, transpose=False), 0, -1)], transposed=False)

    def _apply_rule(self, rule: Rule) -> None:
        matcher = rule.sources[0].matcher()
        for name in self._tensors:
            match = matcher.fullmatch(name)
            if match is None or name in self._taken:
                continue
            holes = match.groupdict()
            names = [operand.name(holes) for operand in rule.sources]
            missing = [other for other in names if other not in self._tensors]
            if missing:
                self.problems.append(
                    f"{name!r} is to be fused with {', '.join(map(repr, missing))}, which is not there"
                )
                continue
            self._taken.update(names)
            if rule.targets:
                self._combine(rule, names, holes)

    def _combine(self, rule: Rule, names: list[str], holes: dict[str, str]) -> None:
        given = [
            self._part(self._rows(self._tensors[name], transpose=rule.transpose), operand)
            for name, operand in zip(names, rule.sources, strict=True)
        ]
        what = f"{', '.join(map(repr, names))}"
        if len({(rows.shape[1:], rows.dtype) for rows in given}) > 1 or not all(rows.shape for rows in given):
            self.problems.append(f"{what} do not fit together: shapes {[rows.shape for rows in given]}")
            return
        if rule.layout == "grouped_qkv":
            outputs = self._grouped(given, len(rule.targets), what)
        elif len(rule.targets) == 1:
            outputs = [[(rows, 0, rows.shape[0]) for rows in given]]
        else:
            count, rest = divmod(given[0].shape[0], len(rule.targets))
            outputs = [[(given[0], i * count, count)] for i in range(len(rule.targets))]
            if rest:
                self.problems.append(f"{what} has {given[0].shape[0]} rows, not to be cut in {len(rule.targets)}")
        for operand, output in zip(rule.targets, outputs, strict=False):
            cut = self._trim(output, rule, what)
            self._put(operand, operand.name(holes), cut, transposed=rule.transpose_after)

    def _grouped(self, given: list[_Rows], num_targets: int, what: str) -> list[list[tuple[_Rows, int, int]]]:
        """Return rows in, or out of, the order of Megatron: for each group of heads its q, its k, its v."""
        groups, heads = self._settings.get("kv_heads", 0), self._settings.get("heads", 0)
        total = sum(rows.shape[0] for rows in given)
        unit = groups and (heads // groups + 2) * groups
        if not unit or heads % groups or total % unit:
            self.problems.append(
                f"{what}: {total} rows do not make {heads} heads in {groups} groups; give heads and kv_heads"
            )
            return []
        rows = total // unit
        counts = (heads // groups * rows, rows, rows)
        if num_targets == 1:
            if [part.shape[0] for part in given] != [count * groups for count in counts]:
                self.problems.append(f"{what}: q, k and v have {[part.shape[0] for part in given]} rows")
                return []
            return [[(p, g * n, n) for g in range(groups) for p, n in zip(given, counts, strict=True)]]
        starts = (0, counts[0], counts[0] + counts[1])
        step = sum(counts)
        return [
            [(given[0], g * step + start, count) for g in range(groups)]
            for start, count in zip(starts, counts, strict=True)
        ]

    def _trim(self, output: list[tuple[_Rows, int, int]], rule: Rule, what: str) -> list[tuple[_Rows, int, int]]:
        if not rule.rows:
            return output
        wanted = self._settings.get(rule.rows)
        there = sum(count for _, _, count in output)
        if wanted is None:
            return output
        if len(output) != 1 or there < wanted:
            self.problems.append(f"{what} has {there} rows, {rule.rows} is {wanted}")
            return output
        return [(output[0][0], output[0][1], wanted)]

    def _rows(self, tensor: ForeignTensor, *, transpose: bool) -> _Rows:
        owner = tensor.alias_of or tensor.name
        is_matrix = len(tensor.shape) == 2
        shape = tensor.shape[::-1] if transpose and is_matrix else tensor.shape
        return _Rows(owner, 0, shape, tensor.dtype, transpose and is_matrix)

    def _part(self, rows: _Rows, operand: Operand) -> _Rows:
        if operand.num_parts == 1:
            return rows
        count, rest = divmod(rows.shape[0] if rows.shape else 0, operand.num_parts)
        if rest:
            self.problems.append(f"{rows.source!r} has {rows.shape[0]} rows, not to be cut in {operand.num_parts}")
        return _Rows(rows.source, operand.part * count, (count, *rows.shape[1:]), rows.dtype, rows.transposed)

    def _put(self, operand: Operand, name: str, output: list[tuple[_Rows, int, int]], *, transposed: bool) -> None:
        parts = self._parts.setdefault(name, {})
        if (operand.part, operand.num_parts) in parts:
            self.problems.append(f"two tensors would be named {name!r}")
        parts[operand.part, operand.num_parts] = (output, transposed)

    def _assemble(self, name: str) -> MappedTensor | None:
        """Return a target of its parts, which are in order and complete."""
        parts = self._parts[name]
        numbers = {num_parts for _, num_parts in parts}
        if len(numbers) != 1 or len(parts) != max(numbers):
            self.problems.append(f"of {name!r} there are the parts {sorted(parts)}, not all")
            return None
        sequence = [item for key in sorted(parts) for item in parts[key][0]]
        first = sequence[0][0]
        dtype = self._cast(name, first.dtype)
        if not first.shape:
            return MappedTensor(
                ForeignTensor(name, dtype, ()),
                first.dtype,
                (MappedPiece(Box((), ()), first.source, (), False),),
            )
        pieces = []
        row = 0
        for rows, start, count in sequence:
            number = rows.shape[0] if count < 0 else count
            pieces.append(rows.piece(row, start, number))
            row += number
        shape = (row, *first.shape[1:])
        if parts[min(parts)][1] and len(shape) == 2:
            shape, pieces = shape[::-1], [piece.turned() for piece in pieces]
        return MappedTensor(ForeignTensor(name, dtype, shape), first.dtype, tuple(pieces))

    def _cast(self, name: str, stored: torch.dtype) -> torch.dtype:
        for pattern, dtype in self._keymap.casts:
            if re.fullmatch(pattern, name):
                return dtype
        return stored


def _tied(made: dict[str, MappedTensor]) -> dict[str, MappedTensor]:
    """Return the tensors with those that are made of the same pieces tied."""
    first: dict[tuple[object, ...], str] = {}
    found: dict[str, MappedTensor] = {}
    for name, mapped in made.items():
        owner = first.setdefault((mapped.pieces, mapped.tensor.dtype), name)
        tensor = mapped.tensor
        if owner != name and 0 not in tensor.shape:
            tensor = ForeignTensor(name, tensor.dtype, tensor.shape, owner)
        found[name] = MappedTensor(tensor, mapped.stored, mapped.pieces)
    return found


def plan_keymap(
    keymap: KeyMap, tensors: Mapping[str, ForeignTensor], settings: Mapping[str, int]
) -> dict[str, MappedTensor]:
    """Return what a key map makes of some tensors, by target name.

    Raises:
        MismatchError: it does not fit: names that no rule speaks of, missing or odd shapes; lists all.
    """
    planner = _Planner(keymap, tensors, settings)
    made = planner.apply()
    if planner.problems:
        shown = "; ".join(planner.problems[:8])
        more = f"; and {len(planner.problems) - 8} more" if len(planner.problems) > 8 else ""
        raise MismatchError(f"cannot map by {keymap.name}: {shown}{more}", problems=tuple(planner.problems))
    return made
