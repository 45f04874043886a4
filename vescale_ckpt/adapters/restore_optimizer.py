"""Optimizers: state found by parameters' names, groups by the names in them, and state that does not exist yet made.

A loaded optimizer goes on as the saved one would: it has the saved options, the saved state where there was any, and
none where there was none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_ckpt.adapters.capture import GROUP_KEYS_LEFT_OUT, refuse_unnameable
from vescale_ckpt.adapters.draft import Draft, Maker, Phase
from vescale_ckpt.adapters.rebuild import NOTHING, Rebuilder
from vescale_ckpt.state.dtypes import dtype_name
from vescale_ckpt.state.tree import DictNode, Key, ListNode, Node, Path, TensorNode, ValueNode, fqn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vescale_ckpt.adapters.names import ParameterNames


@dataclass(frozen=True, slots=True)
class _StoredGroup:
    index: int
    params: Node
    names: tuple[str, ...]
    options: tuple[tuple[Key, Node], ...]

    @property
    def steps_on_device(self) -> bool:
        """Whether torch keeps the step count where the parameter is, and not on the host."""
        return any(bool(_plain_option(node)) for key, node in self.options if key in {"capturable", "fused"})


@dataclass(frozen=True, slots=True)
class _Site:
    """One optimizer in the target and what is stored for it."""

    optimizer: torch.optim.Optimizer
    stored: Path
    path: Path
    state: Mapping[Any, Node]
    groups: tuple[_StoredGroup, ...]

    @property
    def num_groups(self) -> int:
        """How many groups the target has."""
        return len(self.optimizer.param_groups)

    def name(self, *keys: Key) -> str:
        """Return the name of something in the target's optimizer, for people."""
        return fqn((*self.path, *keys))


@dataclass(frozen=True, slots=True)
class _Place:
    """One value of a parameter's state: where it is stored, what it is called, and in which group."""

    stored: Path
    path: Path
    key: Key
    group: _StoredGroup


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of the target under the name that the snapshot has for it."""

    tensor: torch.Tensor
    name: str
    others: tuple[str, ...]
    """Further names by which the snapshot may know it: it is tied there."""
    stored_shape: tuple[int, ...] | None
    """Shape and dtype of the parameter itself in the snapshot, where it has it."""
    stored_dtype: str | None


class OptimizerRestorer:
    """Plans the restore of optimizers."""

    def __init__(self, draft: Draft, names: ParameterNames, rebuild: Rebuilder) -> None:
        self._draft = draft
        self._names = names
        self._rebuild = rebuild
        self._ties: dict[Path, list[Path]] | None = None
        self._keys: dict[tuple[Path, int], dict[bool, set[Key]]] = {}

    def plan(self, optimizer: torch.optim.Optimizer, node: Node, stored: Path, path: Path) -> str | None:
        """Plan one optimizer; return what to do if what is stored is no optimizer's state by name."""
        refuse_unnameable(optimizer, path)
        self._names.of_optimizer(optimizer, path)  # refuses parameters without a name
        items = dict(node.items) if isinstance(node, DictNode) else {}
        state, groups = items.get("state"), items.get("param_groups")
        if not isinstance(state, DictNode) or not isinstance(groups, ListNode):
            return "load it into what it was saved from"
        parsed = [_parse_group(index, group) for index, group in enumerate(groups.items)]
        if any(group is None for group in parsed):
            return (
                "it numbers parameters by position, as optimizer.state_dict() does; read it with the snapshot's "
                "state_dict() and pass it to optimizer.load_state_dict()"
            )
        site = _Site(optimizer, stored, path, dict(state.items), tuple(group for group in parsed if group is not None))
        for group in site.groups:
            self._draft.taken.add_below(
                (*stored, "param_groups", group.index, "params"),
                group.params,
            )
        self._plan_site(site)
        return None

    def _plan_site(self, site: _Site) -> None:
        owner = {name: group.index for group in site.groups for name in group.names}
        found = [[self._parameter(p, owner, site) for p in group["params"]] for group in site.optimizer.param_groups]
        self._refuse_shared_names(site, found)
        matches = self._match(site, owner, found)
        for index, match in enumerate(matches):
            if match is None:
                continue
            self._options(site, index, match)
            for parameter in found[index]:
                if parameter is not None:
                    self._parameter_state(site, match, parameter)
        self._global_state(site, owner)

    def _parameter(self, tensor: torch.Tensor, owner: Mapping[str, int], site: _Site) -> _Parameter | None:
        """Return a parameter under its stored name; None, noted, where the snapshot's optimizer has none for it."""
        plain: dict[str, Path] = {}
        qualified: dict[str, Path] = {}
        for known in self._names.of(tensor):
            module = self._stored_place(known.module)
            for stored in self._tied((*known.module, known.name)):
                if stored[: len(module)] == module:
                    plain[fqn(stored[len(module) :])] = stored
                qualified[fqn(stored)] = stored
        # names are qualified where those of two modules would meet: look for these first
        names = [name for name in (*qualified, *plain) if name in owner]
        if not names:
            name = self._names.of(tensor)[0].name
            if not self._draft.selector.takes(site.name("state", name)):
                return None
            self._draft.problems.append(
                f"missing '{site.name('param_groups')}': the target's optimizer has parameter '{name}', no group of "
                f"the snapshot's has; take it out of the optimizer, or keep what it has with "
                f"ignore=({site.name('state', name)!r},)"
            )
            return None
        record = self._draft.find_record({**plain, **qualified}[names[0]])
        return _Parameter(
            tensor,
            names[0],
            tuple(names[1:]),
            None if record is None else tuple(record.shape),
            None if record is None else record.dtype,
        )

    def _stored_place(self, module: Path) -> Path:
        name = self._draft.selector.renamed(fqn(module))
        found = self._draft.named(name) if name else []
        return found[0][0] if found else module

    def _tied(self, path: Path) -> list[Path]:
        """Return the stored path of a parameter, and those of the stored tensors that are the same one."""
        name = self._draft.selector.renamed(fqn(path))
        if name is not None:
            found = self._draft.named(name)
            path = found[0][0] if found else path
        if self._draft.find_record(path) is None:
            return [path]
        if self._ties is None:
            self._ties = {}
            for stored in self._draft.paths:
                self._ties.setdefault(self._draft.root(stored), []).append(stored)
        tied = self._ties[self._draft.root(path)]
        return [path, *(other for other in tied if other != path)]

    def _refuse_shared_names(self, site: _Site, found: list[list[_Parameter | None]]) -> None:
        seen: set[str] = set()
        for parameter in (p for group in found for p in group if p is not None):
            if parameter.name in seen:
                self._draft.problems.append(
                    f"'{site.name()}': two parameters of the target's optimizer go by the name '{parameter.name}' in "
                    f"the snapshot; load the optimizers one by one, each with its own model"
                )
            seen.add(parameter.name)

    def _match(
        self, site: _Site, owner: Mapping[str, int], found: list[list[_Parameter | None]]
    ) -> list[_StoredGroup | None]:
        """Return the stored group of each group of the target."""
        matches: list[_StoredGroup | None] = [None] * len(found)
        used: dict[int, int] = {}
        for index, parameters in enumerate(found):
            groups = sorted({owner[p.name] for p in parameters if p is not None})
            if len(groups) > 1:
                names = [next(p.name for p in parameters if p and owner[p.name] == g) for g in groups]
                self._draft.problems.append(
                    f"'{site.name('param_groups', index)}': the target has in one group what the snapshot has in "
                    f"groups {groups} (such as {', '.join(names)}); make the same groups"
                )
            elif groups and groups[0] in used:
                self._draft.problems.append(
                    f"'{site.name('param_groups', index)}': the target has in groups {used[groups[0]]} and {index} "
                    f"what the snapshot has in its group {groups[0]}; make the same groups"
                )
            elif groups:
                used[groups[0]] = index
                matches[index] = site.groups[groups[0]]
        for index, group in enumerate(site.optimizer.param_groups):
            if not group["params"]:
                matches[index] = self._match_empty(site, index, used)
        return matches

    def _match_empty(self, site: _Site, index: int, used: dict[int, int]) -> _StoredGroup | None:
        """Return the stored group of a group without parameters: the one at its place, else the next empty one."""
        free = [group for group in site.groups if group.index not in used]
        at_place = [g for g in free if g.index == index and (not g.names or len(site.groups) == site.num_groups)]
        chosen = next(iter([*at_place, *(g for g in free if not g.names)]), None)
        if chosen is not None:
            used[chosen.index] = index
            return chosen
        if self._draft.selector.takes(site.name("param_groups", index)):
            self._draft.problems.append(
                f"missing '{site.name('param_groups', index)}': the target has an empty group, the snapshot has "
                f"{len(site.groups)} groups and none for it; make the same groups"
            )
        return None

    def _options(self, site: _Site, index: int, match: _StoredGroup) -> None:
        group: dict[Any, Any] = site.optimizer.param_groups[index]
        made: dict[Key, Maker] = {}
        for key, node in match.options:
            path = (*site.path, "param_groups", index, key)
            stored = (*site.stored, "param_groups", match.index, key)
            if self._draft.selector.takes(fqn(path)):
                made[key] = self._rebuild.make(group.get(key, NOTHING), node, stored, path)
            else:
                self._draft.taken.add_below(stored, node)
        kept = [key for key in group if key not in dict(match.options) and key not in GROUP_KEYS_LEFT_OUT]
        if kept:
            self._draft.notes.append(f"'{site.name('param_groups', index)}': not stored, kept: {', '.join(kept)}")

        def install() -> None:
            group.update({key: maker() for key, maker in made.items()})

        self._draft.later(Phase.OPTIMIZERS, install)

    def _parameter_state(self, site: _Site, match: _StoredGroup, parameter: _Parameter) -> None:
        path = (*site.path, "state", parameter.name)
        name = next((n for n in (parameter.name, *parameter.others) if n in site.state), None)
        for other in (parameter.name, *parameter.others):
            if other in site.state and other != name:
                self._draft.taken.add_below((*site.stored, "state", other), site.state[other])
                self._draft.notes.append(f"'{fqn(path)}': the snapshot has state under '{other}' too, left out as tied")
        if not self._draft.selector.takes(fqn(path)):
            if name is not None:
                self._draft.taken.add_below((*site.stored, "state", name), site.state[name])
            return
        tensor, state = parameter.tensor, site.optimizer.state
        if name is None:
            if state.get(tensor):
                self._draft.notes.append(
                    f"'{fqn(path)}': the snapshot has no state of this parameter; the target's is cleared"
                )
                self._draft.later(Phase.OPTIMIZERS, lambda: state.pop(tensor) and None)
            return
        node = site.state[name]
        if not isinstance(node, DictNode):
            self._draft.problems.append(f"'{fqn(path)}': the snapshot has no dict of state here")
            return
        existing: dict[Any, Any] = {**(state.get(tensor) or {})}
        self._refuse_partial(site, parameter, _Place((*site.stored, "state", name), path, name, match), node, existing)
        made: dict[Key, Maker] = {}
        for key, child in node.items:
            place = _Place((*site.stored, "state", name, key), (*path, key), key, match)
            made[key] = self._entry(existing.get(key, NOTHING), child, place, parameter)

        def install() -> None:
            state[tensor] = {key: maker() for key, maker in made.items()}

        self._draft.later(Phase.OPTIMIZERS, install)

    def _entry(self, existing: Any, node: Node, place: _Place, parameter: _Parameter) -> Maker:
        """Plan one value of a parameter's state: in the memory it has, or in memory made like the parameter's."""
        if not isinstance(node, TensorNode):
            return self._rebuild.make(existing, node, place.stored, place.path)
        record, tensor = self._draft.record(place.stored), parameter.tensor
        shape = tuple(record.shape)
        if isinstance(existing, torch.Tensor) and tuple(existing.shape) == shape:
            self._draft.fill(existing, place.stored, place.path)
            return lambda: existing
        if shape == parameter.stored_shape != tuple(tensor.shape):
            self._draft.taken.add(place.stored)
            self._draft.problems.append(
                f"'{fqn(place.path)}': the snapshot has shape {list(shape)}, the parameter it belongs to has "
                f"{list(tensor.shape)} in the target; make the model of that shape"
            )
            return lambda: None
        dtype = None
        if self._draft.selector.cast and record.dtype == parameter.stored_dtype and tensor.is_floating_point():
            dtype = tensor.dtype
            if dtype_name(dtype) != record.dtype:
                self._draft.notes.append(f"'{fqn(place.path)}': cast from {record.dtype} to {dtype_name(dtype)}")
        on_host = place.key == "step" and not place.group.steps_on_device
        made = self._draft.allocate(
            place.stored,
            place.path,
            key=("step", str(tensor.device), on_host) if shape == () else ("state", id(tensor)),
            make=lambda shape, dtype: _state_like(tensor, shape, dtype, on_host=on_host and shape == ()),
            dtype=dtype,
        )
        return lambda: made

    def _refuse_partial(
        self, site: _Site, parameter: _Parameter, place: _Place, node: DictNode, existing: dict[Any, Any]
    ) -> None:
        """Note a parameter whose stored state lacks a part of what its optimizer keeps."""
        has = {key for key, _ in node.items}
        expected: set[Any] = set()
        if not _switched(place.group, site.optimizer):
            expected = {key for key, value in existing.items() if isinstance(value, torch.Tensor)}
        if type(site.optimizer).__module__.startswith("torch.optim"):
            # torch's own keep the same for all parameters of a group; Adafactor tells matrices from vectors
            expected = expected | self._keys_in_group(site, place.group)[parameter.tensor.ndim > 1]
        lacks = expected - has
        if lacks:
            name = fqn(place.path)
            parts = [", ".join(sorted(map(str, keys))) for keys in (has, lacks)]
            self._draft.problems.append(
                f"'{name}': the snapshot has only a part of this parameter's state: {parts[0]}, but not {parts[1]}; "
                f"keep what the target has with ignore=({name!r},)"
            )

    def _keys_in_group(self, site: _Site, group: _StoredGroup) -> dict[bool, set[Key]]:
        """Return what the stored states of a group's matrices (True) and of its other parameters hold, all together."""
        known = self._keys.get((site.stored, group.index))
        if known is None:
            known = self._keys[site.stored, group.index] = {True: set(), False: set()}
            for name in group.names:
                node = site.state.get(name)
                if isinstance(node, DictNode):
                    known[self._is_matrix(site, name, node)] |= {key for key, _ in node.items}
        return known

    def _is_matrix(self, site: _Site, name: str, node: DictNode) -> bool:
        """Return whether a parameter has more than one dim, as far as its stored state shows it."""
        keys = [key for key, child in node.items if isinstance(child, TensorNode)]
        return any(len(self._draft.record((*site.stored, "state", name, key)).shape) > 1 for key in keys)

    def _global_state(self, site: _Site, owner: Iterable[str]) -> None:
        """Plan what an optimizer keeps beside its parameters' state."""
        known = set(owner)
        state: dict[Any, Any] = site.optimizer.state
        for key, node in site.state.items():
            path = (*site.path, "state", key)
            # state under a name that is in no group may also be that of a lost parameter: that is unexpected
            is_ours = key not in known and (key in state or not isinstance(node, DictNode))
            if is_ours and self._draft.selector.takes(fqn(path)):
                maker = self._rebuild.make(state.get(key, NOTHING), node, (*site.stored, "state", key), path)
                self._draft.later(Phase.OPTIMIZERS, _installer(state, key, maker))


def _installer(state: dict[Any, Any], key: Any, maker: Maker) -> Callable[[], None]:
    def install() -> None:
        state[key] = maker()

    return install


def _parse_group(index: int, node: Node) -> _StoredGroup | None:
    """Return a stored parameter group; None if its parameters have no names."""
    items: dict[Key, Node] = dict(node.items) if isinstance(node, DictNode) else {}
    params = items.pop("params", None)
    names: list[Any] = []
    if isinstance(params, DictNode):
        names = [key for key, _ in params.items]
    elif isinstance(params, ListNode):
        names = [child.value if isinstance(child, ValueNode) else None for child in params.items]
    if params is None or not all(isinstance(name, str) for name in names):
        return None
    options = tuple((key, child) for key, child in items.items() if key not in GROUP_KEYS_LEFT_OUT)
    return _StoredGroup(index, params, tuple(names), options)


def _plain_option(node: Node) -> Any:
    return node.value if isinstance(node, ValueNode) else None


def _switched(group: _StoredGroup, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether saved options turn something on or off that the target's do not: state then differs rightly."""
    kinds = (bool, type(None))
    targets: list[dict[Any, Any]] = optimizer.param_groups
    for key, node in group.options:
        stored = _plain_option(node)
        for target in targets:
            is_switch = key == "momentum" or isinstance(stored, kinds) or isinstance(target.get(key), kinds)
            if is_switch and isinstance(node, ValueNode) and bool(stored) != bool(target.get(key)):
                return True
    return False


def _state_like(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, on_host: bool) -> torch.Tensor:
    """Return new memory for a state of a parameter, where and as that optimizer would make it itself."""
    if on_host:
        return torch.empty(shape, dtype=dtype)
    if shape == tuple(tensor.shape):
        return torch.empty_like(tensor.detach(), dtype=dtype)
    if not isinstance(tensor, DTensor) or not shape:
        return torch.empty(shape, dtype=dtype, device=tensor.device)
    mesh = tensor.device_mesh
    local = torch.empty(shape, dtype=dtype, device=tensor.to_local().device)
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
