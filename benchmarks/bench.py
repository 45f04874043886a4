"""The bench: where a question puts its samples, with the loop that lets sides take turns."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from benchmarks.case import OURS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from benchmarks.case import Scale
    from benchmarks.measure import Sample


class Bench:
    """One case under way.

    Args:
        scale: how large everything is.
        repeats: measured turns of each side.
        folder: a folder of the case's own, on its storage; emptied by whoever made it.
    """

    def __init__(self, scale: Scale, repeats: int, folder: Path) -> None:
        self.scale = scale
        self.repeats = repeats
        self.folder = folder
        self.first: dict[str, Sample] = {}
        """Side -> what its first turn took, with nothing warm; not among the samples."""
        self.samples: dict[str, list[Sample]] = {}
        self.order: list[str] = []
        """Sides as they are to be shown, where that is not the order of their first samples."""
        self.notes: list[str] = []
        self.missing: dict[str, str] = {}
        """Side -> why it did not take part."""

    def note(self, text: str) -> None:
        """Say something about the figures."""
        if text not in self.notes:
            self.notes.append(text)

    def leave_out(self, side: str, why: str) -> None:
        """Say that a side does not take part."""
        self.missing[side] = why
        self.first.pop(side, None)
        self.samples.pop(side, None)

    def add(self, side: str, sample: Sample, *, first: bool = False) -> None:
        """Add what one turn of a side took."""
        if first:
            self.first[side] = sample
        else:
            self.samples.setdefault(side, []).append(sample)

    def compare(self, sides: Mapping[str, Callable[[int], Sample]], *, warm_up: bool = True) -> None:
        """Let every side take its turns: each turn begins with another side, so none is always first after a pause.

        A peer that raises is left out, and the result says why; when we raise, the case fails.

        Args:
            sides: name -> what to do in a turn (given its number); measures the part that counts.
            warm_up: whether a turn is taken before those that are measured; its sample is kept apart.
        """
        names = list(sides)
        self.order += names
        for turn in range(self.repeats + warm_up):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                if name in self.missing:
                    continue
                try:
                    sample = sides[name](turn)
                except Exception as error:
                    if name.startswith(OURS):
                        raise
                    self.leave_out(name, f"{type(error).__name__}: {error}"[:300])
                else:
                    self.add(name, sample, first=warm_up and turn == 0)

    def empty(self, name: str) -> Path:
        """Return a folder that is there and empty."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path
