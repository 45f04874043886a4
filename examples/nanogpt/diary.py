"""The diary of a run: what happened, one JSON object a line, written by one rank and read by whoever watches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


class Diary:
    """The writing side, which starts anew; without a path it keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.write_bytes(b"")

    def write(self, event: str, **facts: Any) -> None:
        """Add a line; it is with the system when this returns, whatever happens to the process next."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, **facts}) + "\n")


def read_diary(path: Path) -> list[dict[str, Any]]:
    """Return what a diary says so far; a killed writer may have left half a last line, which is left out."""
    if not path.exists():
        return []
    whole_lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in whole_lines]
