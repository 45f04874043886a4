"""Pictures of a snapshot: the treemap of its tensors, and which rank of a mesh holds which part of the largest ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from vescale_tools.output import format_bytes
from vescale_tools.report.svg import CHAR_WIDTH, color, fitted, ink_on, label, rect, svg
from vescale_tools.report.treemap import Area, squarify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.usage import NameUsage

WIDTH: Final = 960.0
MAP_HEIGHT: Final = 420.0
_MOST_TILES: Final = 250
_TENSOR_WIDTH: Final = 300.0
_TENSOR_HEIGHT: Final = 150.0
_PER_ROW: Final = 3


def group_of(name: str) -> str:
    """Return what tensors are coloured by: the first part of their names, and of an optimizer's the last one too."""
    parts = name.split(".")
    return f"{parts[0]} {parts[-1]}" if len(parts) > 1 and parts[0].startswith("optim") else parts[0]


def tensor_treemap(tensors: Sequence[NameUsage]) -> str:
    """Return the tensors of a snapshot as a treemap; the smallest ones together where there are very many."""
    ordered = sorted((each for each in tensors if each.tensor_bytes), key=lambda each: (-each.tensor_bytes, each.name))
    shown, rest = ordered[:_MOST_TILES], ordered[_MOST_TILES:]
    items = [(each.name, float(each.tensor_bytes), group_of(each.name)) for each in shown]
    if rest:
        items.append((f"{len(rest):,} smaller tensors", float(sum(each.tensor_bytes for each in rest)), "smaller"))
        items.sort(key=lambda item: -item[1])
    groups = list(dict.fromkeys(group for _, _, group in items))
    parts = []
    for (name, size, group), area in zip(
        items, squarify([size for _, size, _ in items], Area(0, 24, WIDTH, MAP_HEIGHT - 24)), strict=True
    ):
        fill = color(groups.index(group))
        about = f"{name}: {format_bytes(int(size))}"
        parts.append(rect(area.x, area.y, area.width, area.height, fill, about=about, style="tile"))
        text = fitted(name, area.width - 8)
        if text and area.height > 16:
            parts.append(label(area.x + 4, area.y + 13, text, style=ink_on(fill)))
            if area.height > 30 and area.width > 60:
                parts.append(label(area.x + 4, area.y + 26, format_bytes(int(size)), style=ink_on(fill)))
    x = 0.0
    for number, group in enumerate(groups[:10]):
        parts += [rect(x, 4, 10, 10, color(number)), label(x + 15, 13, group, style="small")]
        x += 15 + len(group) * CHAR_WIDTH + 24
    return svg(WIDTH, MAP_HEIGHT, parts, "tensors by size")


def shard_map(tensors: Sequence[tuple[str, tuple[int, ...], tuple[tuple[Box, ...], ...]]]) -> str:
    """Return tensors with the boxes that ranks hold of them, the first dim downwards, the others to the right.

    Args:
        tensors: name, shape, and per rank its boxes.
    """
    rows = math.ceil(len(tensors) / _PER_ROW)
    parts: list[str] = []
    for number, (name, shape, held) in enumerate(tensors):
        x = number % _PER_ROW * (WIDTH / _PER_ROW)
        y = number // _PER_ROW * (_TENSOR_HEIGHT + 44.0)
        parts.append(label(x, y + 12, fitted(name, _TENSOR_WIDTH), style="small"))
        parts.append(label(x, y + 26, " x ".join(map(str, shape)) or "one number", style="small"))
        parts += _boxes(shape, held, Area(x, y + 32, _TENSOR_WIDTH, _TENSOR_HEIGHT))
    return svg(WIDTH, max(rows, 1) * (_TENSOR_HEIGHT + 44.0), parts, "which rank holds which part")


def _boxes(shape: tuple[int, ...], held: tuple[tuple[Box, ...], ...], within: Area) -> list[str]:
    """Return the boxes of one tensor; one that several ranks hold is drawn once and names all of them."""
    holders: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    parts = []
    for box, ranks in holders.items():
        area = _place(box, shape, within)
        names = ranks_text(ranks)
        where = ", ".join(f"{start}:{stop}" for start, stop in zip(box.offset, box.end, strict=True))
        about = f"[{where}]: {'rank' if len(ranks) == 1 else 'ranks'} {names}"
        parts.append(rect(area.x, area.y, area.width, area.height, color(ranks[0]), about=about, style="tile"))
        text = names if len(names) * CHAR_WIDTH <= area.width - 6 else ""
        if text and area.height > 14:
            middle = area.x + area.width / 2, area.y + area.height / 2 + 4
            parts.append(label(*middle, text, anchor="middle", style=ink_on(color(ranks[0]))))
    return parts


def _place(box: Box, shape: tuple[int, ...], within: Area) -> Area:
    """Return where a box is drawn: its first dim is the height, and its second, or the only one, the width."""
    if not shape:
        return within
    down = (box.offset[0], box.shape[0], shape[0]) if len(shape) > 1 else (0, 1, 1)
    right = (box.offset[1], box.shape[1], shape[1]) if len(shape) > 1 else (box.offset[0], box.shape[0], shape[0])
    return Area(
        within.x + within.width * right[0] / right[2],
        within.y + within.height * down[0] / down[2],
        within.width * right[1] / right[2],
        within.height * down[1] / down[2],
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``0-3, 8`` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
