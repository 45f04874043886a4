"""A Hugging Face folder: one safetensors file, or several with an index, as one set of named tensors.

The index is a stranger's: what it names is checked before anything is opened, and every file's header is checked
against it before anything is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import FormatError, NotFoundError
from vescale_ckpt.format.json_text import decode_json, take
from vescale_ckpt.interop.safetensors.file import SafetensorsFile, read_safetensors_header
from vescale_ckpt.interop.safetensors.header import MAX_HEADER_BYTES
from vescale_ckpt.interop.safetensors.local import file_errors
from vescale_ckpt.interop.safetensors.ties import decode_ties

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import torch

SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
SUFFIX: Final = ".safetensors"
_ONE_OF_SEVERAL: Final = re.compile(r"-of-0*(?:[2-9]|1\d)\d*\.safetensors$")
_NUM_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class HfFolder:
    """The tensors of a folder, all headers read and checked, no data read."""

    path: Path
    files: Mapping[str, tuple[str, ...]]
    """File name -> names of the tensors in it."""
    ties: Mapping[str, str]
    """Name that is stored nowhere -> name of the tensor that it is the same as."""


def load_hf(path: str | os.PathLike[str]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights of a Hugging Face folder, or of one safetensors file, as a state to save: ``{"model": ...}``.

    Below ``model`` are the tensors by their dotted names, as a module's ``state_dict`` has them, so that a module under
    the same key loads the snapshot. Tied names are restored: the same tensor object under each.

    Raises:
        NotFoundError: there is no such folder, or files that the index names are not there.
        FormatError: a file or the index is not what it should be; nothing outside the folder is opened.
        StorageError: a file cannot be read.
    """
    folder = open_hf(path)
    model: dict[str, torch.Tensor] = {}
    for file_name, names in folder.files.items():
        with SafetensorsFile(folder.path / file_name) as file:
            for name in names:
                model[name] = file.read(name)
    for name, stored in folder.ties.items():
        model[name] = model[stored]
    return {"model": model}


def open_hf(path: str | os.PathLike[str]) -> HfFolder:
    """Return what is in a Hugging Face folder, or in one safetensors file, without reading any tensor.

    As Hugging Face's own loaders do, ``model.safetensors`` is preferred to an index beside it.

    Raises:
        NotFoundError, FormatError, StorageError: as for ``load_hf``.
    """
    path = Path(path)
    with file_errors("look into", path):
        if not path.is_dir():
            path.stat()
            return _open_files(path.parent, [path.name], None)
        if (path / SINGLE_NAME).exists():
            return _open_files(path, [SINGLE_NAME], None)
        if (path / INDEX_NAME).exists():
            index = _read_index(path / INDEX_NAME)
            return _open_files(path, list(dict.fromkeys(index.weight_map.values())), index)
        found = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(SUFFIX))
    if len(found) == 1 and not is_one_of_several(found[0]):
        return _open_files(path, found, None)
    which = f"it has {_some(found)} and no index that says which belong together" if found else "it has no such file"
    raise NotFoundError(
        f"cannot import {path}: expected {SINGLE_NAME} or {INDEX_NAME}; {which}; pass the path of one file",
        path=str(path),
    )


@dataclass(frozen=True, slots=True)
class Index:
    """Which tensors an index puts into which file, and what else it says."""

    what: str
    """Where it was read, for messages."""
    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any]


def is_one_of_several(name: str) -> bool:
    """Return whether a file's name says that it is a part of a set."""
    return bool(_ONE_OF_SEVERAL.search(name))


def _read_index(path: Path) -> Index:
    with file_errors("read", path), path.open("rb") as file:
        text = file.read(MAX_HEADER_BYTES + 1)
    return parse_index(text, str(path))


def parse_index(text: bytes, what: str) -> Index:
    """Return what an index says; no file that it names is outside its folder.

    Raises:
        FormatError: it is no index, or names such a file.
    """
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(f"cannot read {what}: it is larger than {MAX_HEADER_BYTES} bytes", path=what)
    index = decode_json(text, what, floats=True)
    weight_map: dict[str, Any] = take(index, "weight_map", dict, what)
    for name, file_name in weight_map.items():
        problem = _name_problem(file_name)
        if problem:
            raise FormatError(
                f"cannot read {what}: it puts {name[:80]!r} into {str(file_name)[:200]!r}, {problem}",
                path=what,
                fqn=name,
            )
    metadata = index.get("metadata")
    return Index(what, weight_map, metadata if type(metadata) is dict else {})


def _name_problem(name: Any) -> str:
    """Return why a file of this name is not opened, or an empty string."""
    if type(name) is not str or not name or name in {".", ".."} or "\0" in name:
        return "which is no file name"
    if PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
        return "which is not a plain name of a file in the same folder"
    return "" if name.endswith(SUFFIX) else f"which does not end in {SUFFIX}"


def _open_files(path: Path, file_names: list[str], index: Index | None) -> HfFolder:
    _refuse_missing(path, file_names)
    files: dict[str, tuple[str, ...]] = {}
    where: dict[str, str] = {}
    metadata: list[tuple[str, Mapping[str, Any]]] = []
    for file_name in file_names:
        header = read_safetensors_header(path / file_name)
        files[file_name] = tuple(header.tensors)
        metadata.append((str(path / file_name), header.metadata))
        for name in header.tensors:
            if name in where:
                raise FormatError(
                    f"cannot import {path}: {name[:80]!r} is both in {where[name]} and in {file_name}", fqn=name
                )
            where[name] = file_name
    if index is not None:
        check_index(index, where)
        metadata.append((index.what, index.metadata))
    return HfFolder(path, files, merge_ties(metadata, where))


def _refuse_missing(path: Path, file_names: list[str]) -> None:
    missing = [name for name in file_names if not (path / name).exists()]
    if missing:
        raise NotFoundError(
            f"cannot import {path}: {len(missing)} of {len(file_names)} files are not there: {_some(missing)}; "
            "download them again",
            path=str(path),
        )


def check_index(index: Index, where: Mapping[str, str]) -> None:
    """Refuse an index that disagrees with the files.

    Args:
        index: what it says.
        where: tensor name -> file that holds it, as the headers say.

    Raises:
        FormatError: they disagree.
    """
    elsewhere = [name for name, file_name in index.weight_map.items() if where.get(name) != file_name]
    unknown = [name for name in where if name not in index.weight_map]
    problems = []
    if elsewhere:
        problems.append(f"{len(elsewhere)} tensors are not in the file that it names ({_some(elsewhere)})")
    if unknown:
        problems.append(f"the files hold {len(unknown)} tensors that it does not name ({_some(unknown)})")
    if problems:
        raise FormatError(f"cannot import by {index.what}: {' and '.join(problems)}", path=index.what)


def merge_ties(metadata: list[tuple[str, Mapping[str, Any]]], where: Mapping[str, str]) -> dict[str, str]:
    """Return ``{name left out: name stored}`` of several (file, its metadata).

    Raises:
        FormatError: they contradict each other.
    """
    ties: dict[str, str] = {}
    for what, entries in metadata:
        for name, stored in decode_ties(entries, where, what).items():
            if ties.setdefault(name, stored) != stored:
                raise FormatError(
                    f"cannot read {what}: it ties {name[:80]!r} to {stored[:80]!r}, another file of the folder to "
                    f"{ties[name][:80]!r}",
                    path=what,
                )
    return ties


def _some(names: list[str]) -> str:
    """Return the first few names, for a message."""
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(repr(name[:80]) for name in names[:_NUM_NAMED]) + more
