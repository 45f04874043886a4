"""Who is still there: every pipeline rank leaves signs of life, so that a failed step can say which rank is gone.

A rank that dies takes its neighbours' connections with it, and theirs fall as they end. What each of them gets from
the network names an address. Signs of life tell a dead rank from one that waits; words tell why a live one gave up.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from vescale_train.errors import RankFailureError, VeScaleError
from vescale_train.torch_private import default_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_train.pipe.place import Place

BEAT_SECONDS = 0.5
SILENT_SECONDS = 2.5
"""Without a sign for so long, a rank is gone."""


class SignsOfLife:
    """This rank's signs, from when it is made, and a look at those of the others."""

    def __init__(self, place: Place) -> None:
        group = place.group
        self.ranks = [] if group is None or place.num_ranks == 1 else dist.get_process_group_ranks(group)
        self.me = dist.get_rank() if self.ranks else 0
        self._place = f"vescale-train/alive/{hashlib.sha256(str(self.ranks).encode()).hexdigest()[:16]}"
        if self.ranks:
            threading.Thread(target=self._beat, name="pipeline signs of life", daemon=True).start()

    def _beat(self) -> None:
        count = 0
        while True:
            count += 1
            try:
                default_store().set(f"{self._place}/{self.me}", str(count))
            except (RuntimeError, ValueError):  # the group is gone, and nobody asks any more
                return
            time.sleep(BEAT_SECONDS)

    def silent(self) -> set[int]:
        """Return the ranks that gave no sign while this call waited."""
        before = {rank: self._read(f"{self._place}/{rank}") for rank in self.ranks}
        time.sleep(SILENT_SECONDS)
        return {rank for rank, sign in before.items() if self._read(f"{self._place}/{rank}") == sign}

    def leave_word(self, text: str) -> None:
        """Tell the others why this rank gave up."""
        with contextlib.suppress(RuntimeError):
            default_store().set(f"{self._place}/{self.me}/word", text)

    def words(self) -> dict[int, str]:
        """Return what other ranks have told before they gave up."""
        told = {rank: self._read(f"{self._place}/{rank}/word") for rank in self.ranks if rank != self.me}
        return {rank: text for rank, text in told.items() if text}

    @staticmethod
    def _read(key: str) -> str:
        try:
            return default_store().get(key).decode() if default_store().check([key]) else ""
        except RuntimeError:  # the store lived in a process that is gone
            return ""

    @contextlib.contextmanager
    def naming_the_dead(self) -> Iterator[None]:
        """Turn what a rank gets when another one has died or given up into an error that names that rank.

        Raises:
            RankFailureError: another rank is gone or has given up; ``failures`` has who and why.
        """
        try:
            yield
        except VeScaleError as error:
            self.leave_word(f"{type(error).__name__}: {error}")
            raise
        except Exception as error:
            if not self.ranks:
                raise
            failures = self.words()
            failures |= {rank: "gone without a word" for rank in self.silent() - {self.me} if rank not in failures}
            self.leave_word(f"{type(error).__name__}: {error}" if not failures else f"gave up after {failures}")
            if not failures:
                raise
            told = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
            raise RankFailureError(
                f"a pipeline step over ranks {self.ranks} failed on rank {self.me}: {told}", failures=failures
            ) from error
