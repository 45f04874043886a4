"""Modules under the names that they have in the whole model, whatever they are called where they are run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vescale_train.pipe.errors import SplitError

if TYPE_CHECKING:
    from collections.abc import Mapping


def global_tree(tree: nn.Module, module: nn.Module, names: Mapping[str, str], stage: int) -> None:
    """Hang the modules of a stage into a tree under their global names.

    Raises:
        SplitError: a name is taken, or a parameter of the stage is in none of the modules named.
    """
    for name, _ in module.named_parameters():
        if not any(name == local or name.startswith(f"{local}.") for local in names):
            raise SplitError(f"cannot name parameter {name!r} of stage {stage}: none of {dict(names)} leads to it")
    for local, whole in names.items():
        place(tree, whole, module.get_submodule(local))


def place(tree: nn.Module, name: str, module: nn.Module) -> None:
    """Hang a module into a tree.

    Raises:
        SplitError: something else hangs there.
    """
    *path, last = name.split(".")
    at = tree
    for key in path:
        if key not in at._modules:  # noqa: SLF001 - get_submodule raises for what is not there
            at.add_module(key, nn.Module())
        at = at.get_submodule(key)
    found = at._modules.get(last)  # noqa: SLF001
    if found is not None and found is not module:
        raise SplitError(f"cannot build stages: two modules are called {name!r} in the whole model; give global names")
    at.add_module(last, module)
