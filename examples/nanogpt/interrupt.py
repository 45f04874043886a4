"""Kill a job in the middle of a save, and be sure that it was in the middle.

To look first and to kill then would leave a moment in between, in which the save may end. So the job is frozen as soon
as a save's first object shows up in the store, and looked at while nothing moves: it is killed if the save's objects
are there and its snapshot is not, and let go on to its next save otherwise.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.errors import NotFoundError
from vescale_storage import keys, loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from launch import Job

    from vescale_ckpt import Store
    from vescale_storage.backend import Backend

POLL_SECONDS = 0.002
SETTLE_SECONDS = 0.5
"""What a frozen process has sent already, a server may still be storing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wreck:
    """What a killed save left in the store."""

    newest_step: int
    """The last step that was saved whole: the killed save is the one after it."""
    num_objects: int
    """Objects and unfinished files of the killed save."""


def kill_during_save(
    job: Job, store: Store, run: str, *, after_step: int, watch: Callable[[], None] = lambda: None
) -> Wreck | None:
    """Kill the job during its first save after ``after_step`` that can be caught half done.

    Returns None if the job ended before that happened. ``watch`` is called now and then.
    """
    newest, seen = newest_step(store, run), _parts(store.backend)
    while job.is_running():
        now = newest_step(store, run)
        if now != newest:  # whatever stands there by now belongs to saves that are done
            newest, seen = now, _parts(store.backend)
            watch()
        elif newest is None or newest < after_step:
            watch()
        elif _parts(store.backend) - seen:
            job.freeze()
            time.sleep(SETTLE_SECONDS)
            parts = _parts(store.backend) - seen
            if parts and newest_step(store, run) == newest:
                job.kill()
                if newest_step(store, run) != newest:
                    raise RuntimeError(f"a snapshot appeared after step {newest} although its writers had been frozen")
                return Wreck(newest_step=newest, num_objects=len(parts))
            job.thaw()
        time.sleep(POLL_SECONDS)
    return None


def newest_step(store: Store, run: str) -> int | None:
    """Return the step of a run's newest snapshot, or None if there is none yet."""
    try:
        return store[run].step
    except NotFoundError:
        return None


def _parts(backend: Backend) -> set[str]:
    """Return the names of all that saves write before they commit: packs, manifests, fragments, unfinished files."""
    return loop.run(_list_parts(backend))


async def _list_parts(backend: Backend) -> set[str]:
    names = {leftover.name for leftover in await backend.leftovers()}
    for prefix in (keys.PACKS_PREFIX, keys.MANIFESTS_PREFIX, keys.TRANSACTIONS_PREFIX):
        names |= {info.key async for info in backend.list(prefix)}
    return names
