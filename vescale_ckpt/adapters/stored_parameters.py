"""Stored parameters: what a snapshot calls a parameter of the target, through renames and ties on either side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_ckpt.state.tree import Path, fqn

if TYPE_CHECKING:
    from collections.abc import Container

    import torch

    from vescale_ckpt.adapters.draft import Draft
    from vescale_ckpt.adapters.names import ParameterNames


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A parameter of the target under the name that the snapshot's optimizer has for it."""

    tensor: torch.Tensor
    name: str
    others: tuple[str, ...]
    """Further names that the snapshot's optimizer has for it: it was not tied where it was saved."""
    root: Path | None
    """The stored tensor that the parameter itself is; equal for those that were tied when saved."""
    shape: tuple[int, ...] | None
    """Of the parameter itself in the snapshot; None where that does not hold it."""
    dtype: str | None


class StoredParameters:
    """Finds parameters of the target in one snapshot."""

    def __init__(self, draft: Draft, names: ParameterNames) -> None:
        self._draft = draft
        self._names = names
        self._ties: dict[Path, list[Path]] | None = None

    def name(self, tensor: torch.Tensor) -> str:
        """Return the name of a parameter in the target."""
        return self._names.of(tensor)[0].name

    def find(self, tensor: torch.Tensor, known: Container[str]) -> StoredParameter | None:
        """Return a parameter under the names among ``known`` that it has, None if it has none of them."""
        within: dict[str, Path] = {}
        qualified: dict[str, Path] = {}
        for own in self._names.of(tensor):
            module = self._place(own.module)
            for stored in self._tied(self._place((*own.module, own.name))):
                if stored[: len(module)] == module:
                    within.setdefault(fqn(stored[len(module) :]), stored)
                qualified.setdefault(fqn(stored), stored)
        # Names start with the place of the module where those of two modules would meet: look for these first.
        places = {**within, **qualified}
        names = [name for name in (*qualified, *(n for n in within if n not in qualified)) if name in known]
        if not names:
            return None
        record = self._draft.find_record(places[names[0]])
        if record is None:
            return StoredParameter(tensor, names[0], tuple(names[1:]), None, None, None)
        root = self._draft.root(record.path)
        return StoredParameter(tensor, names[0], tuple(names[1:]), root, tuple(record.shape), record.dtype)

    def _place(self, path: Path) -> Path:
        """Return the stored path of a path in the target."""
        name = self._draft.selector.renamed(fqn(path))
        found = self._draft.named(name) if name is not None else []
        return found[0][0] if found else path

    def _tied(self, path: Path) -> list[Path]:
        """Return a stored path and those of the stored tensors that are the same one."""
        if self._draft.find_record(path) is None:
            return [path]
        if self._ties is None:
            self._ties = {}
            for stored in self._draft.paths:
                self._ties.setdefault(self._draft.root(stored), []).append(stored)
        return [path, *(other for other in self._ties[self._draft.root(path)] if other != path)]
