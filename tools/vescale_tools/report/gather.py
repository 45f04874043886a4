"""What the report shows, gathered from the manifests of a run: no tensor is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import SnapshotNotFoundError
from vescale_ckpt.plan.forecast import Forecast, forecast_load
from vescale_ckpt.state.tree import ValueNode, walk
from vescale_ckpt.usage import NameUsage, Usage, UsageMeter, by_name
from vescale_tools.meshes import MeshText, place, read_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.store import SnapshotInfo, Store

_NUM_MAPPED = 6
"""Tensors in the shard map."""


@dataclass(slots=True)
class RunReport:
    """All that the page shows."""

    url: str
    run: str
    usage: Usage
    tags: dict[int, tuple[str, ...]]
    newest: str
    world_size: int
    writer: str
    tensors: list[NameUsage]
    mesh: MeshText
    forecast: Forecast
    mapped: list[tuple[str, tuple[int, ...]]]
    """Name and shape of the tensors of the shard map, the largest first, no two alike."""
    loss_name: str = ""
    loss: list[tuple[float, float]] = field(default_factory=list)
    """(step, or place in the history, and value)."""
    seconds: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(step, phase -> seconds)."""


def gather(
    store: Store,
    run: str,
    *,
    mesh: MeshText | None,
    plan: str | None,
    loss: str | None,
    progress: Callable[[str, int], None],
) -> RunReport:
    """Read the manifests of a run and return what its report shows.

    Args:
        store: where it is.
        run: which.
        mesh: for the shard map; None for the ranks that saved, or four, as ``fsdp``.
        plan: a plan file for it.
        loss: name of the value that is the loss; None finds one.
        progress: called with what is done and how many of it.

    Raises:
        SnapshotNotFoundError: there is no such run.
        UsageError: mesh and plan do not fit.
    """
    infos = sorted(store.snapshots(run), key=lambda info: (info.created_seconds, info.step))
    meter, logs = UsageMeter(), _Logs(loss)
    newest: tuple[SnapshotInfo, Manifest] | None = None
    for number, info in enumerate(infos, 1):
        try:
            manifest = store[info.name].manifest
        except SnapshotNotFoundError:  # pruned meanwhile
            continue
        meter.add(manifest, info.version)
        logs.add(info.step, manifest)
        if newest is None or info.step >= newest[0].step:
            newest = info, manifest
        progress("manifests", number)
    if newest is None:
        raise SnapshotNotFoundError(f"cannot report on '{run}' in {store.url}: its snapshots are gone", run=run)
    info, manifest = newest
    shape = mesh or MeshText(("fsdp",), (manifest.world_size if manifest.world_size > 1 else 4,))
    rules = None if plan is None else read_rules(plan)
    name, points = logs.loss()
    return RunReport(
        url=store.url,
        run=run,
        usage=meter.usage(),
        tags={each.step: each.tags for each in infos if each.tags},
        newest=info.name,
        world_size=manifest.world_size,
        writer=manifest.writer,
        tensors=by_name(manifest),
        mesh=shape,
        forecast=forecast_load(manifest, shape.shape, place(manifest, shape, rules)),
        mapped=_largest(manifest),
        loss_name=name,
        loss=points,
        seconds=logs.seconds,
    )


def _largest(manifest: Manifest) -> list[tuple[str, tuple[int, ...]]]:
    """Return the largest tensors of which no two have the same shape."""
    by_shape: dict[tuple[int, ...], str] = {}
    for record in manifest.tensors:
        if record.alias_of is None and len(record.shape) > 1:
            by_shape.setdefault(record.shape, record.fqn)
    ordered = sorted(by_shape.items(), key=lambda item: -_volume(item[0]))
    return [(name, shape) for shape, name in ordered[:_NUM_MAPPED]]


def _volume(shape: tuple[int, ...]) -> int:
    volume = 1
    for size in shape:
        volume *= size
    return volume


class _Logs:
    """Finds numbers that people log beside their tensors: a loss, seconds by phase."""

    def __init__(self, wanted: str | None) -> None:
        self._wanted = wanted
        self._scalars: dict[str, list[tuple[float, float]]] = {}
        self._history: dict[str, list[tuple[float, float]]] = {}
        self.seconds: list[tuple[int, dict[str, float]]] = []

    def add(self, step: int, manifest: Manifest) -> None:
        """Look at the plain values and the metadata of a snapshot."""
        phases: dict[str, float] = {}
        histories: dict[str, list[tuple[float, float]]] = {}
        for path, value in _numbers(manifest):
            name = ".".join(map(str, path))
            if len(path) > 1 and path[-2] == "seconds":
                phases[str(path[-1])] = value
            elif len(path) > 1 and isinstance(path[-1], int) and self._is_loss(path[:-1]):
                histories.setdefault(".".join(map(str, path[:-1])), []).append((float(path[-1]), value))
            elif self._is_loss(path):
                self._scalars.setdefault(name, []).append((float(step), value))
        self._history = histories or self._history
        phases.pop("total", None)
        if phases:
            self.seconds.append((step, phases))

    def _is_loss(self, path: tuple[Any, ...]) -> bool:
        name = ".".join(map(str, path))
        return name == self._wanted if self._wanted is not None else "loss" in str(path[-1]).lower()

    def loss(self) -> tuple[str, list[tuple[float, float]]]:
        """Return (name, points): the longest history of the newest snapshot, or a number that most snapshots have."""
        counts = Counter({name: len(points) for name, points in {**self._scalars, **self._history}.items()})
        if not counts:
            return "", []
        name = min(counts, key=lambda each: (-counts[each], each))
        return name, sorted({**self._scalars, **self._history}[name])


def _numbers(manifest: Manifest) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Yield (path, value) of the numbers in a snapshot's metadata and plain values."""
    yield from _below((), manifest.metadata)
    for path, node in walk(manifest.tree):
        if isinstance(node, ValueNode) and path and type(node.value) in {int, float}:
            yield path, float(node.value)


def _below(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], float]]:
    if type(value) in {int, float}:
        yield path, float(value)
    items: Mapping[Any, Any] | None = value if isinstance(value, dict) else None
    if isinstance(value, list):
        items = dict(enumerate(value))
    for key, item in (items or {}).items():
        yield from _below((*path, key), item)
