"""What ``fsck`` and ``verify --deep`` print of a survey."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from vescale_storage import loop
from vescale_storage.backends import open_backend
from vescale_storage.wrappers.retry import RetryBackend, RetryPolicy
from vescale_tools.output import count, format_bytes, iso_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vescale_ckpt.repairing.findings import Finding, Orphan, Survey
    from vescale_storage.backend import Backend
    from vescale_tools.output import Output

_NUM_NAMED = 4


@contextlib.contextmanager
def opened(url: str, options: Mapping[str, Any]) -> Iterator[Backend]:
    """Yield the storage behind a URL, also where no store opens there."""
    backend = RetryBackend(open_backend(url, options), RetryPolicy())
    try:
        yield backend
    finally:
        loop.run(backend.close())


def print_survey(output: Output, survey: Survey, url: str) -> None:
    """Print what was found."""
    for finding in survey.findings:
        output.line(f"{finding.kind}  {finding.key}", "yellow" if finding.fix else "red")
        output.line(f"  {finding.problem}")
        if finding.snapshots:
            more = len(finding.snapshots) - _NUM_NAMED
            named = ", ".join(finding.snapshots[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
            output.line(f"  hurts {named}")
        output.line(f"  {'repair' if finding.fix else 'no repair'}: {finding.outlook}")
    looked = f"{count(survey.num_snapshots, 'ref')} and tags, {count(survey.num_packs, 'pack')}"
    read = f", {format_bytes(survey.bytes_read)} read" if survey.bytes_read else ""
    output.line(
        f"{url}: {looked}, {count(survey.num_chunks, 'chunk')}{read}: "
        + (f"{count(len(survey.findings), 'finding')}" if survey.findings else "nothing is wrong")
    )


def survey_json(survey: Survey) -> dict[str, Any]:
    """Return a survey for ``--json``."""
    return {
        "ok": survey.ok,
        "snapshots": survey.num_snapshots,
        "packs": survey.num_packs,
        "chunks": survey.num_chunks,
        "bytes_read": survey.bytes_read,
        "findings": [finding_json(finding) for finding in survey.findings],
        "orphans": [orphan_json(orphan) for orphan in survey.orphans],
    }


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return a finding for ``--json``."""
    return {
        "kind": str(finding.kind),
        "key": finding.key,
        "problem": finding.problem,
        "can_repair": finding.fix is not None,
        "outlook": finding.outlook,
        "snapshots": list(finding.snapshots),
    }


def orphan_json(orphan: Orphan) -> dict[str, Any]:
    """Return an orphan for ``--json``."""
    return {
        "manifest": orphan.name,
        "snapshot": f"{orphan.run}@{orphan.step}",
        "created": iso_time(orphan.created_seconds),
        "packs": orphan.num_packs,
        "missing_packs": orphan.num_missing,
    }
