"""Optimizers: state found by parameters' names, groups by the names in them, and state that does not exist yet made.

A loaded optimizer goes on as the saved one would: it has the saved options, the saved state where there was any, and
none where there was none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_ckpt.adapters.capture import refuse_unnameable
from vescale_ckpt.adapters.cut_optimizer import CutOptimizer, plain_optimizer
from vescale_ckpt.adapters.draft import Draft, Maker, Phase, missing
from vescale_ckpt.adapters.groups import KEYS_LEFT_OUT, StoredGroup, is_switched, match_groups, parse_group
from vescale_ckpt.adapters.rebuild import NOTHING, Rebuilder
from vescale_ckpt.adapters.stored_parameters import StoredParameter, StoredParameters
from vescale_ckpt.state.dtypes import dtype_from_name, dtype_name
from vescale_ckpt.state.sharded_view import ShardedView
from vescale_ckpt.state.tree import DictNode, Key, ListNode, Node, Path, TensorNode, fqn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vescale_ckpt.adapters.fsdp1 import FlatRange
    from vescale_ckpt.adapters.names import ParameterNames
    from vescale_ckpt.format.records import TensorRecord


@dataclass(frozen=True, slots=True)
class _Site:
    """One optimizer in the target and what is stored for it."""

    optimizer: torch.optim.Optimizer
    stored: Path
    path: Path
    state: Mapping[Any, Node]
    groups: tuple[StoredGroup, ...]

    def name(self, *keys: Key) -> str:
        """Return the name of something in the target's optimizer, for people."""
        return fqn((*self.path, *keys))


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter's state, or one value of it: where it is stored, what it is called, and in which group."""

    stored: Path
    path: Path
    group: StoredGroup

    def below(self, key: Key) -> _Place:
        """Return the place of one value of it."""
        return _Place((*self.stored, key), (*self.path, key), self.group)


class OptimizerRestorer:
    """Plans the restore of optimizers."""

    def __init__(self, draft: Draft, names: ParameterNames, rebuild: Rebuilder) -> None:
        self._draft = draft
        self._names = names
        self._rebuild = rebuild
        self._parameters = StoredParameters(draft, names)
        self._keys: dict[tuple[Path, int], dict[bool, set[Key]]] = {}

    def plan(self, optimizer: torch.optim.Optimizer, node: Node, stored: Path, path: Path) -> str | None:
        """Plan one optimizer; return what to do if what is stored is no optimizer's state by name.

        Raises:
            InvalidInputError: its parameters have no names in this state.
        """
        refuse_unnameable(optimizer, path)
        self._names.of_optimizer(optimizer, path)
        items = dict(node.items) if isinstance(node, DictNode) else {}
        state, groups = items.get("state"), items.get("param_groups")
        if not isinstance(state, DictNode) or not isinstance(groups, ListNode):
            return "load it into what it was saved from"
        parsed = [parse_group(index, group) for index, group in enumerate(groups.items)]
        if any(group is None for group in parsed):
            return (
                "it numbers parameters by position, as optimizer.state_dict() does; read it with the snapshot's "
                "state_dict() and pass it to optimizer.load_state_dict()"
            )
        site = _Site(optimizer, stored, path, dict(state.items), tuple(group for group in parsed if group is not None))
        if not self._wanted(site):
            self._draft.taken.add_below(stored, node)
            return None
        if not self._plan_site(site):
            self._draft.taken.add_below(stored, node)  # one reason is enough
        return None

    def _wanted(self, site: _Site) -> bool:
        """Return whether ``only`` has anything of this optimizer."""
        names = [site.name(), *(site.name("state", key) for key in site.state)]
        names += [site.name("param_groups", group.index, key) for group in site.groups for key in group.options]
        return any(self._draft.selector.names(name) for name in names)

    def _plan_site(self, site: _Site) -> bool:
        """Plan groups and state; return whether the groups match."""
        known = {name for group in site.groups for name in group.names}
        found = [
            [p for tensor in group["params"] if (p := self._find(tensor, known, site)) is not None]
            for group in site.optimizer.param_groups
        ]
        self._refuse_shared_names(site, [p for group in found for p in group])
        # None: nothing of a group that has parameters is in the snapshot, which has been said or is allowed
        names = [
            [p.name for p in here] if here or not group["params"] else None
            for group, here in zip(site.optimizer.param_groups, found, strict=True)
        ]
        matching = match_groups(site.groups, names)
        problems = [
            f"'{site.name('param_groups', index)}': {reason}; make the same groups"
            for index, reason in matching.problems
            if self._draft.selector.takes(site.name("param_groups", index))
        ]
        self._draft.problems.extend(problems)
        for index, group in enumerate(matching.groups):
            if group is not None:
                self._options(site, index, group)
                for parameter in found[index]:
                    self._parameter_state(site, group, parameter)
        self._global_state(site, known)
        return not problems

    def _find(self, tensor: torch.Tensor, known: set[str], site: _Site) -> StoredParameter | None:
        """Return a parameter under its stored name; None where the snapshot's optimizer does not have it."""
        found = self._parameters.find(tensor, known)
        if found is None and self._draft.selector.takes(site.name("state", self._parameters.name(tensor))):
            name = site.name("state", self._parameters.name(tensor))
            self._draft.problems.append(missing(name, "this parameter in its optimizer"))
        return found

    def _refuse_shared_names(self, site: _Site, parameters: Sequence[StoredParameter]) -> None:
        seen: dict[str, Path | None] = {}
        for parameter in parameters:
            # two parameters that were one when saved rightly have one state there
            tied = parameter.root is not None and seen.get(parameter.name) == parameter.root
            if parameter.name in seen and not tied:
                self._draft.problems.append(
                    f"'{site.name()}': two parameters of the target's optimizer go by the name '{parameter.name}' in "
                    f"the snapshot; load the optimizers one by one, each with its own model"
                )
            seen[parameter.name] = parameter.root

    def _options(self, site: _Site, index: int, match: StoredGroup) -> None:
        group: dict[Any, Any] = site.optimizer.param_groups[index]
        made: dict[Key, Maker] = {}
        for key, node in match.left_out.items():
            self._draft.taken.add_below((*site.stored, "param_groups", match.index, key), node)
        for key, node in match.options.items():
            path = (*site.path, "param_groups", index, key)
            stored = (*site.stored, "param_groups", match.index, key)
            if self._draft.selector.takes(fqn(path)):
                made[key] = self._rebuild.make(group.get(key, NOTHING), node, stored, path)
            else:
                self._draft.taken.add_below(stored, node)
        self._refuse_other_kind(site, index, match)
        kept = [str(key) for key in group if key not in match.options and key not in KEYS_LEFT_OUT]
        if kept:
            self._draft.notes.append(f"'{site.name('param_groups', index)}': not stored, kept: {', '.join(kept)}")

        def install() -> None:
            group.update({key: maker() for key, maker in made.items()})

        self._draft.later(Phase.OPTIMIZERS, install)

    def _refuse_other_kind(self, site: _Site, index: int, match: StoredGroup) -> None:
        """Note a snapshot of another kind of optimizer; switches come and go with versions of torch, numbers do not."""
        own: dict[str, Any] = site.optimizer.defaults
        kind = type(plain_optimizer(site.optimizer)).__name__
        lacks = [
            key
            for key, value in own.items()
            if key not in match.options
            and not isinstance(value, bool | None)
            and self._draft.selector.takes(site.name("param_groups", index, key))
        ]
        if lacks:
            self._draft.problems.append(
                f"'{site.name('param_groups', index)}': the target's {kind} has {', '.join(lacks)}, the snapshot has "
                f"not, it is of another kind of optimizer; use that kind, or keep the target's "
                f"with ignore=({site.name('param_groups', '*', lacks[0])!r},)"
            )

    def _parameter_state(self, site: _Site, group: StoredGroup, parameter: StoredParameter) -> None:
        path = (*site.path, "state", parameter.name)
        stored = [name for name in (parameter.name, *parameter.others) if name in site.state]
        if not self._draft.selector.takes(fqn(path)):
            for name in stored:
                self._draft.taken.add_below((*site.stored, "state", name), site.state[name])
            return
        for other in stored[1:]:
            self._draft.taken.add_below((*site.stored, "state", other), site.state[other])
            self._draft.notes.append(
                f"'{fqn(path)}': the snapshot has state of '{other}' too, which is the same parameter here; "
                f"'{stored[0]}' is taken"
            )
        if not stored:
            self._clear_state(site, parameter, path)
            return
        node = site.state[stored[0]]
        place = _Place((*site.stored, "state", stored[0]), path, group)
        if not isinstance(node, DictNode):
            self._draft.problems.append(f"'{fqn(path)}': the snapshot has no dict here; it was saved otherwise")
            return
        flat = self._names.flat(parameter.tensor)
        if flat is not None and not flat.numel:
            return  # those ranks have this state that have a part of the parameter
        state: dict[Any, Any] = site.optimizer.state
        existing: dict[Any, Any] = state.get(parameter.tensor) or {}
        self._refuse_partial(site, parameter, place, node, existing)
        made = self._entries(existing, node, place, parameter, site.optimizer)
        dropped = [str(key) for key in existing if key not in made]
        if dropped:
            self._draft.notes.append(f"'{fqn(path)}': not stored, dropped from the target: {', '.join(dropped)}")

        def install() -> None:
            state[parameter.tensor] = {key: maker() for key, maker in made.items()}

        self._draft.later(Phase.OPTIMIZERS, install)

    def _entries(
        self,
        existing: dict[Any, Any],
        node: DictNode,
        place: _Place,
        parameter: StoredParameter,
        optimizer: torch.optim.Optimizer,
    ) -> dict[Key, Maker]:
        """Plan what one parameter's state will be: what is stored, and what is to stay as it is."""
        takes = self._draft.selector.takes
        made: dict[Key, Maker] = {k: _constant(v) for k, v in existing.items() if not takes(fqn((*place.path, k)))}
        for key, child in node.items:
            below = place.below(key)
            if takes(fqn(below.path)):
                made[key] = self._entry(existing.get(key, NOTHING), child, below, parameter, optimizer)
            else:
                self._draft.taken.add_below(below.stored, child)
        return made

    def _clear_state(self, site: _Site, parameter: StoredParameter, path: Path) -> None:
        state: dict[Any, Any] = site.optimizer.state
        if state.get(parameter.tensor):
            self._draft.notes.append(f"'{fqn(path)}': no state of this parameter is stored; the target's is cleared")

            def clear() -> None:
                del state[parameter.tensor]

            self._draft.later(Phase.OPTIMIZERS, clear)

    def _entry(
        self, existing: Any, node: Node, place: _Place, parameter: StoredParameter, optimizer: torch.optim.Optimizer
    ) -> Maker:
        """Plan one value of a parameter's state: in the memory it has, or in memory made like the parameter's."""
        if not isinstance(node, TensorNode):
            inner = Rebuilder(self._draft, device=parameter.tensor.device)
            return inner.make(existing, node, place.stored, place.path)
        record, tensor = self._draft.record(place.stored), parameter.tensor
        shape = tuple(record.shape)
        counts_steps = place.path[-1] == "step" and shape == ()
        device = torch.device("cpu") if counts_steps and not place.group.steps_on_device else tensor.device
        flat = self._names.flat(tensor)
        if flat is not None and shape == flat.shape:
            return self._flat_entry(existing, flat, tensor, place)
        is_there = _fits(existing, shape) and (not counts_steps or existing.device == device)
        memory = existing if is_there else None if counts_steps else _new_part(optimizer, tensor, record)
        if memory is not None:
            self._draft.fill(memory, place.stored, place.path)
            return lambda: memory
        if shape == parameter.shape != tuple(tensor.shape):
            self._draft.taken.add(place.stored)
            self._draft.problems.append(
                f"'{fqn(place.path)}': the snapshot has shape {list(shape)}, the parameter it belongs to has "
                f"{list(tensor.shape)} in the target; make the model of that shape"
            )
            return lambda: None
        like = None if counts_steps else tensor
        made = self._draft.allocate(
            place.stored,
            place.path,
            key=(str(device), id(tensor), counts_steps),
            make=lambda shape, dtype: _state_like(like, shape, dtype, device),
            dtype=self._cast(record.dtype, parameter, place.path) if shape else None,  # scalars count and keep theirs
        )
        return lambda: made

    def _flat_entry(self, existing: Any, flat: FlatRange, tensor: torch.Tensor, place: _Place) -> Maker:
        """Plan a value that is as large as a flattened parameter, of which this rank has a part."""
        dtype = dtype_from_name(self._draft.record(place.stored).dtype)
        made: Any = existing if flat.fits(existing) else torch.empty_like(tensor.detach(), dtype=dtype)
        self._draft.fill(flat.view_of(made), place.stored, place.path)
        return lambda: made

    def _cast(self, dtype: str, parameter: StoredParameter, path: Path) -> torch.dtype | None:
        """Return another dtype for state that has the stored parameter's, where casts are allowed: it follows it."""
        wanted = parameter.tensor.dtype
        if not self._draft.selector.cast or dtype != parameter.dtype or dtype == dtype_name(wanted):
            return None
        self._draft.notes.append(f"'{fqn(path)}': cast from {dtype} to {dtype_name(wanted)}, as its parameter is")
        return wanted

    def _refuse_partial(
        self, site: _Site, parameter: StoredParameter, place: _Place, node: DictNode, existing: dict[Any, Any]
    ) -> None:
        """Note a parameter whose stored state lacks a part of what its optimizer keeps."""
        has = {key for key, _ in node.items}
        expected: set[Any] = set()
        if not is_switched(place.group, site.optimizer):
            expected = {key for key, value in existing.items() if isinstance(value, torch.Tensor | ShardedView)}
        if type(plain_optimizer(site.optimizer)).__module__.startswith("torch.optim"):
            # torch's own keep the same for all parameters of a group; Adafactor tells matrices from vectors
            expected = expected | self._keys_in_group(site, place.group)[self._num_dims(parameter.tensor) > 1]
        lacks = sorted(str(key) for key in expected - has if self._draft.selector.takes(fqn((*place.path, key))))
        if lacks:
            self._draft.problems.append(
                f"'{fqn(place.path)}': the snapshot has only a part of this parameter's state: "
                f"{', '.join(sorted(map(str, has)))}, but not {', '.join(lacks)}; leave that as it is in the target "
                f"with ignore=({site.name('state', '*', lacks[0])!r},)"
            )

    def _num_dims(self, tensor: torch.Tensor) -> int:
        flat = self._names.flat(tensor)
        return tensor.ndim if flat is None else len(flat.shape)

    def _keys_in_group(self, site: _Site, group: StoredGroup) -> dict[bool, set[Key]]:
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

    def _global_state(self, site: _Site, known: set[str]) -> None:
        """Plan what an optimizer keeps beside its parameters' state."""
        state: dict[Any, Any] = site.optimizer.state
        for key, node in site.state.items():
            path = (*site.path, "state", key)
            # a dict under a name that is in no group may be the state of a lost parameter: that is unexpected
            is_ours = key not in known and (key in state or not isinstance(node, DictNode))
            if is_ours and self._draft.selector.takes(fqn(path)):
                maker = self._rebuild.make(state.get(key, NOTHING), node, (*site.stored, "state", key), path)
                self._draft.later(Phase.OPTIMIZERS, _installer(state, key, maker))


def _fits(existing: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a value of the target's has memory for a stored one of this shape."""
    if isinstance(existing, ShardedView):
        return existing.global_shape == shape
    return isinstance(existing, torch.Tensor) and tuple(existing.shape) == shape


def _new_part(optimizer: torch.optim.Optimizer, tensor: torch.Tensor, record: TensorRecord) -> ShardedView | None:
    """Return memory for what an optimizer keeps of a state as large as its parameter, None if it keeps all of it."""
    if not isinstance(optimizer, CutOptimizer) or tuple(record.shape) != tuple(tensor.shape):
        return None
    return optimizer.new_state(tensor, dtype_from_name(record.dtype))


def _constant(value: Any) -> Maker:
    return lambda: value


def _installer(state: dict[Any, Any], key: Any, maker: Maker) -> Callable[[], None]:
    def install() -> None:
        state[key] = maker()

    return install


def _state_like(
    tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return new memory for a state of a parameter, as its optimizer would make it itself."""
    if tensor is not None and shape == tuple(tensor.shape):
        return torch.empty_like(tensor.detach(), dtype=dtype)
    if not isinstance(tensor, DTensor) or not shape:
        return torch.empty(shape, dtype=dtype, device=device)
    mesh = tensor.device_mesh
    return DTensor.from_local(
        torch.empty(shape, dtype=dtype, device=device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
