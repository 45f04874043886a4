"""Where a conversion writes: a scratch area beside the target, from which files get their final names when all is done.

``<target>/.vescale-convert/`` holds the plan's key, the files under way with a log of what is whole, and a record of
each file that is finished. A conversion with the same key goes on there; one with another key begins anew.
"""

from __future__ import annotations

import abc
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vescale_ckpt.errors import AlreadyExistsError, FormatError
from vescale_ckpt.interop.foreign.files import SCRATCH_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_ckpt.interop.convert.files import TargetFile

_KEY_NAME: Final = "plan.json"


@dataclass(slots=True)
class Done:
    """A file that is finished."""

    name: str
    num_bytes: int
    digest: str
    """BLAKE3 of its content."""
    overflowed: dict[str, int] = field(default_factory=dict)
    resumed_bytes: int = 0
    """Found from an earlier attempt; of this attempt only."""
    peak_rss_bytes: int = 0
    """Of the process that wrote it, so far; of this attempt only."""

    def encode(self) -> bytes:
        """Return the record's text."""
        fields = {"name": self.name, "num_bytes": self.num_bytes, "digest": self.digest, "overflowed": self.overflowed}
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, text: bytes | None) -> Done | None:
        """Return the record of a text; None where it is none."""
        try:
            fields = json.loads(text or b"")
            return cls(str(fields["name"]), int(fields["num_bytes"]), str(fields["digest"]), dict(fields["overflowed"]))
        except (ValueError, KeyError, TypeError):
            return None


class Target(abc.ABC):
    """A folder, or one file in it, at some URL."""

    def __init__(self, url: str, file_name: str) -> None:
        self.url = url
        self.scratch = f"{SCRATCH_PREFIX}-{file_name}" if file_name else SCRATCH_PREFIX
        self._file_name = file_name

    # ---- what a place owes

    @abc.abstractmethod
    def get(self, name: str) -> bytes | None:
        """Return a small file; None where it is not."""

    @abc.abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""

    @abc.abstractmethod
    def present(self) -> list[str]:
        """Return the names in the target folder, or the one file's name if it is there, without scratch."""

    @abc.abstractmethod
    def write(
        self, number: int, file: TargetFile, overflows: Callable[[], dict[str, int]], advance: Callable[[int], None]
    ) -> Done:
        """Write a file to the end, going on where an earlier attempt ended."""

    @abc.abstractmethod
    def publish(self, number: int, name: str) -> None:
        """Give a finished file its name; again changes nothing."""

    @abc.abstractmethod
    def clean(self) -> None:
        """Remove the scratch area, and the target folder if that leaves it empty."""

    # ---- what follows from it

    def begin(self, key: str, *, resume: bool) -> bool:
        """Make ready; return whether an interrupted conversion is gone on with.

        Raises:
            AlreadyExistsError: something else is there.
        """
        if resume and self._key() == key:
            return True
        self.refuse_present()
        self.clean()
        self.put(f"{self.scratch}/{_KEY_NAME}", json.dumps({"key": key}).encode())
        return False

    def refuse_present(self) -> None:
        """Refuse a target that is there.

        Raises:
            AlreadyExistsError: it is.
        """
        present = self.present()
        if present:
            some = ", ".join(present[:4]) + (", ..." if len(present) > 4 else "")
            raise AlreadyExistsError(
                f"cannot convert to {self.url}: it is there already ({some}); name a place that is not", path=self.url
            )

    def _key(self) -> str:
        try:
            found = json.loads(self.get(f"{self.scratch}/{_KEY_NAME}") or b"{}")
            return str(found.get("key", ""))
        except (ValueError, AttributeError) as error:
            raise FormatError(f"cannot convert to {self.url}: {self.scratch} is damaged; remove it") from error

    def has_key(self, key: str) -> bool:
        """Return whether the conversion of this key has begun."""
        return self._key() == key

    def done(self, number: int) -> Done | None:
        """Return the record of a finished file."""
        return Done.decode(self.get(f"{self.scratch}/{number}.done"))

    def record(self, number: int, done: Done) -> None:
        """Write the record of a finished file."""
        self.put(f"{self.scratch}/{number}.done", done.encode())
