"""Optimizer state as one dict by parameters' names, and back; from a plain optimizer's numbers too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale_train.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


def named_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return ``{"state": {name: ...}, "param_groups": [...]}``; ``names`` is by the id of a parameter."""
    state: Mapping[Any, Any] = optimizer.state
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": {names[id(p)]: dict(values) for p, values in state.items()}, "param_groups": groups}


def load_named_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Take groups and state that were saved by name, or by number as torch's optimizers do.

    Raises:
        InvalidInputError: it names other parameters or groups; nothing is changed then.
    """
    groups = saved["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise InvalidInputError(
            f"cannot load optimizer state: it has {len(groups)} parameter groups, this optimizer has "
            f"{len(optimizer.param_groups)}; make the same groups"
        )
    key_of: dict[Any, torch.Tensor] = {}
    for index, (own, other) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        if len(own["params"]) != len(other["params"]):
            raise InvalidInputError(
                f"cannot load optimizer state: its group {index} has {len(other['params'])} parameters, this "
                f"optimizer's has {len(own['params'])}; make the same groups"
            )
        key_of |= _match(own["params"], other["params"], names, index)
    unknown = [key for key in saved["state"] if key not in key_of]
    if unknown:
        raise InvalidInputError(
            f"cannot load optimizer state: {len(unknown)} of its parameters are in no group ({unknown[:5]})"
        )
    state: Any = optimizer.state
    for parameter in list(state):
        del state[parameter]
    for key, values in saved["state"].items():
        state[key_of[key]] = values
    copy_options(groups, optimizer.param_groups)


def copy_options(groups: Sequence[Mapping[str, Any]], to: Sequence[dict[str, Any]]) -> None:
    """Give some groups the options of others, which are as many; each keeps its own parameters."""
    for source, target in zip(groups, to, strict=True):
        target.update({key: value for key, value in source.items() if key != "params"})


def _match(own: list[torch.Tensor], saved: list[Any], names: Mapping[int, str], index: int) -> dict[Any, torch.Tensor]:
    """Return the parameter for each saved name or number of a group."""
    if not all(isinstance(key, str) for key in saved):
        return dict(zip(saved, own, strict=True))
    by_name = {names[id(p)]: p for p in own}
    missing = [name for name in saved if name not in by_name]
    if missing:
        raise InvalidInputError(
            f"cannot load optimizer state: its group {index} has {missing[:5]}, which are not in this optimizer's "
            f"group {index}; make the same groups"
        )
    return {name: by_name[name] for name in saved}
