"""One conversion: plan the files, write them within the budget, give them their names when all are whole."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import ConfigError, FormatError, InvalidInputError, StorageTimeoutError
from vescale_ckpt.interop.convert.job import Job, Work, keymap_of, peak_rss_bytes, plan_job
from vescale_ckpt.interop.convert.options import DEFAULT_BUDGET_BYTES, ConvertReport, part_bytes_of
from vescale_ckpt.interop.convert.target import Done
from vescale_ckpt.interop.convert.to_store import save_to_store

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot
    from vescale_ckpt.interop.keymap.rules import KeyMap

_POLL_SECONDS: Final = 0.5


def convert(  # noqa: PLR0913 - each names a place, or how to treat it
    source: str | os.PathLike[str] | ForeignSnapshot,
    target: str | os.PathLike[str],
    *,
    keymap: str | os.PathLike[str] | KeyMap | None = None,
    settings: Mapping[str, int] | None = None,
    source_format: str | None = None,
    target_format: str | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    workers: int = 1,
    resume: bool = True,
    max_shard_bytes: int | None = None,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    share: tuple[int, int] = (0, 1),
    deadline_seconds: float = 3600.0,
    dry_run: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ConvertReport:
    """Convert a checkpoint and return what was done.

    Files get their final names when all of them are whole; until then they grow in a scratch folder beside, and the
    same call goes on there after an interruption, as long as the source is what it was.

    Args:
        source: a path or fsspec URL; a store's with ``#run@step`` behind it; or an open snapshot (with one worker).
        target: a path or fsspec URL that is not there yet; ``.safetensors``, ``.pt`` and ``.npz`` name one file,
            ``URL#run@step`` a snapshot of a store, which goes through a file in the folder for temporary ones.
        keymap: how tensors are renamed, fused, split and cast: a shipped map (``llama:hf->megatron``), or a file.
        settings: numbers that the key map needs (``heads``, ...) and the source's ``config.json`` lacks.
        source_format: what the source is; None looks.
        target_format: ``safetensors``, ``dcp``, ``torch_save``, ``npz`` or ``zarr``; None goes by the target's name,
            and a folder becomes ``safetensors``.
        budget_bytes: of tensors held at once, by all workers together.
        workers: processes; each writes files of its own.
        resume: go on where an earlier call with the same source and options ended.
        max_shard_bytes: start another file when one would grow beyond this.
        source_options: passed to the source's file system.
        target_options: passed to the target's.
        share: (rank, world size): of several hosts that call this at once each writes its files, rank 0 the names.
        deadline_seconds: how long rank 0 waits for the others.
        dry_run: only plan; the report says what would be written.
        progress: called with the bytes just written, or found to be there.

    Raises:
        AlreadyExistsError: the target is there.
        ConfigError: an option is wrong.
        FormatError, CorruptionError: the source is nothing that is known, or damaged; nothing is left at the target.
        MismatchError: the key map does not fit the source.
        InvalidInputError: the target's format cannot hold what the source has.
        StorageError: either side failed; the same call goes on later.
    """
    began = time.monotonic()
    job = plan_job(source, target, source_format, target_format, max_shard_bytes)
    job = replace(
        job,
        source_options=source_options,
        target_options=target_options,
        keymap=keymap_of(keymap, settings),
        options=replace(job.options, part_bytes=part_bytes_of(budget_bytes, workers)),
    )
    if workers > 1 and job.snapshot is not None:
        raise ConfigError("cannot convert an open snapshot with several workers: pass its URL")
    work = Work(job)
    try:
        if dry_run:
            return _plan(work)
        if job.to_store:
            report = _save(work, share, progress or (lambda _: None))
            report.seconds = time.monotonic() - began
            return report
        found = _run(work, workers, share, deadline_seconds, resume=resume, advance=progress or (lambda _: None))
    except (FormatError, InvalidInputError) as error:
        if share[0] == 0 and not isinstance(error, ConfigError):
            work.clean()  # what is wrong with the source stays wrong
        raise
    finally:
        if job.snapshot is None:
            work.source.close()
    report = _report(work, found)
    report.seconds = time.monotonic() - began
    return report


def _plan(work: Work) -> ConvertReport:
    """Return what would be done."""
    if work.job.to_store:
        num_bytes = sum(t.num_bytes for t in work.source.tensors().values() if t.alias_of is None)
        return _report(work, [Done(work.job.target, num_bytes, "")])
    work.target.refuse_present()
    return _report(work, [Done(file.name, file.num_bytes, "") for file in work.layout.files])


def _save(work: Work, share: tuple[int, int], advance: Callable[[int], None]) -> ConvertReport:
    """Save the source as a snapshot of a store, on rank 0."""
    if share[0] != 0:
        return _report(work, [])
    saved = save_to_store(work.source, work.job.target, work.job.target_options, work.job.options, advance)
    return _report(work, [Done(f"{saved.run}@{saved.step}", saved.bytes_total, "")])


def _run(
    work: Work,
    workers: int,
    share: tuple[int, int],
    deadline_seconds: float,
    *,
    resume: bool,
    advance: Callable[[int], None],
) -> list[Done]:
    rank, world_size = share
    if not 0 <= rank < world_size:
        raise ConfigError(f"cannot convert as rank {rank} of {world_size}")
    if not work.source.tensors():
        raise InvalidInputError(f"cannot convert {work.source.url}: it has no tensors")
    key = work.key()
    if rank == 0:
        work.target.begin(key, resume=resume)
    else:
        _wait(lambda: work.target.has_key(key), deadline_seconds, "rank 0 to begin")
    numbers = range(rank, len(work.layout.files), world_size)
    found = _write_all(work, numbers, workers, advance)
    if rank != 0:
        return found
    if world_size > 1:
        count = len(work.layout.files)
        _wait(lambda: all(work.target.done(i) for i in range(count)), deadline_seconds, "the other ranks' files")
        found = [done for i in range(count) if (done := work.target.done(i)) is not None]
    _publish(work)
    return found


def _write_all(work: Work, numbers: range, workers: int, advance: Callable[[int], None]) -> list[Done]:
    if workers == 1 or len(numbers) < 2:
        return [work.write(number, advance) for number in numbers]
    found: dict[int, Done] = {}
    pool = ProcessPoolExecutor(
        min(workers, len(numbers)),
        multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(work.job,),
    )
    try:
        futures = {pool.submit(_write_one, number): number for number in numbers}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            advance(found[futures[future]].num_bytes)
    finally:
        pool.shutdown(cancel_futures=True)
    return [found[number] for number in numbers]


_worker: list[Work] = []
"""The work of this process, where it is a worker."""


def _begin_worker(job: Job) -> None:
    _worker[:] = [Work(job)]


def _write_one(number: int) -> Done:
    return _worker[0].write(number, lambda _: None)


def _wait(ready: Callable[[], bool], deadline_seconds: float, what: str) -> None:
    end = time.monotonic() + deadline_seconds
    while not ready():
        if time.monotonic() > end:
            raise StorageTimeoutError(f"waited {deadline_seconds} s for {what} of this conversion", retryable=True)
        time.sleep(_POLL_SECONDS)


def _publish(work: Work) -> None:
    """Give all files their names: the data, what is carried along, and last what makes it a checkpoint."""
    for number, file in enumerate(work.layout.files):
        work.target.publish(number, file.name)
    for name in work.layout.carried:
        work.target.put(name, work.source.files.read_all(name))
    for name, data in work.layout.last.items():
        work.target.put(name, data)
    work.target.clean()


def _report(work: Work, found: list[Done]) -> ConvertReport:
    overflowed: dict[str, int] = {}
    for done in found:
        for name, count in done.overflowed.items():
            overflowed[name] = overflowed.get(name, 0) + count
    return ConvertReport(
        source=work.source.url,
        target=work.target.url,
        source_format=work.source_format,
        target_format=work.job.target_format,
        num_tensors=len(work.source.tensors()),
        num_bytes=sum(done.num_bytes for done in found),
        files=tuple(done.name for done in found) + tuple(work.layout.last),
        carried=tuple(work.layout.carried),
        left_out=tuple(work.layout.left_out),
        notes=work.source.notes,
        overflowed=overflowed,
        bytes_resumed=sum(done.resumed_bytes for done in found),
        peak_rss_bytes=max([peak_rss_bytes(), *(done.peak_rss_bytes for done in found)]),
    )
