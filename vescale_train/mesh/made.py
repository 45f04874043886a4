"""The mesh that was made last, for names that take no mesh: veScale's global mesh object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_train.errors import StateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_made: list[DeviceMesh] = []


def use(mesh: DeviceMesh) -> None:
    """Make this the current mesh."""
    _made[:] = [mesh]


def current() -> DeviceMesh:
    """Return the current mesh.

    Raises:
        StateError: if none has been made.
    """
    if not _made:
        raise StateError("there is no mesh yet: call vescale_train.init(...) first")
    return _made[0]


def is_made() -> bool:
    """Return whether there is a current mesh."""
    return bool(_made)
