"""Worlds of ranks as threads of one process, which save and load through the front door."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import vescale_ckpt as vc
from tests.distributed.threads import run_ranks
from vescale_ckpt.errors import RankFailureError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_ckpt.coordinate.group import Group
    from vescale_ckpt.store import Store
    from vescale_storage.backend import Backend

RUN = "run"


def memory_store() -> Store:
    """Return a store that nobody else uses."""
    return vc.open_store(f"memory://{uuid.uuid4().hex}")


def store_on(backend: Backend, *, exists: bool = False) -> Store:
    """Return a store over a back end as it is, without retries."""
    return vc.Store(backend, exists=exists)


def checkpointer(store: Store, group: Group, run: str = RUN, **options: Any) -> vc.Checkpointer:
    """Return the checkpointer of one rank of a world of threads."""
    made = vc.Checkpointer(store, run, options=vc.SaveOptions(**options) if options else None)
    made._group_made = group
    return made


def all_well(outcomes: list[Any]) -> list[Any]:
    """Return the outcomes, or raise the error of the rank that failed first and not of one that only heard of it."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, RankFailureError)):
        raise error
    return outcomes


def try_save(
    store: Store,
    world_size: int,
    state_of: Callable[[int], Any],
    *,
    step: int = 1,
    run: str = RUN,
    base: str | None = None,
    **options: Any,
) -> list[Any]:
    """Save ``state_of(rank)`` on every rank; return what each rank's save returned or raised."""

    def body(group: Group) -> vc.SaveReport:
        with checkpointer(store, group, run, **options) as ranks_own:
            return ranks_own.save(step, state_of(group.rank), base=base).result()

    return run_ranks(world_size, body)


def save(store: Store, world_size: int, state_of: Callable[[int], Any], **more: Any) -> list[vc.SaveReport]:
    """Save on every rank, which must go well."""
    return all_well(try_save(store, world_size, state_of, **more))


def try_load(
    store: Store,
    world_size: int,
    state_of: Callable[[int], Any],
    *,
    step: int | None = None,
    run: str = RUN,
    **options: Any,
) -> list[Any]:
    """Load into ``state_of(rank)`` on every rank; return what each rank's load returned or raised."""

    def body(group: Group) -> vc.LoadReport:
        with checkpointer(store, group, run) as ranks_own:
            return ranks_own.load(state_of(group.rank), step, **options)

    return run_ranks(world_size, body)


def load(store: Store, world_size: int, state_of: Callable[[int], Any], **more: Any) -> list[vc.LoadReport]:
    """Load on every rank, which must go well."""
    return all_well(try_load(store, world_size, state_of, **more))
