"""Tied tensors in safetensors: stored under one name, the other names in the metadata.

Other tools write ``{left out: stored}`` as plain entries of the metadata, beside entries that mean something else. We
write these for them, and one entry of our own that is unmistakable and is believed alone where it is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vescale_ckpt.errors import FormatError
from vescale_ckpt.format.json_text import decode_json, encode_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

TIES_KEY: Final = "vescale_ckpt.ties"
_RESERVED: Final = frozenset({"format", "total_size", "total_parameters", TIES_KEY})


def encode_ties(ties: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata for ``{name left out: name stored}``."""
    if not ties:
        return {}
    plain = {name: stored for name, stored in ties.items() if name not in _RESERVED}
    return {**plain, TIES_KEY: encode_json(dict(ties)).decode()}


def other_metadata(metadata: Mapping[str, object], ties: Mapping[str, str]) -> dict[str, str]:
    """Return what a file's metadata says beside its ties and what every writer says anew."""
    return {
        name: text
        for name, text in metadata.items()
        if isinstance(text, str) and name not in _RESERVED and name not in ties
    }


def decode_ties(metadata: Mapping[str, object], names: Collection[str], what: str) -> dict[str, str]:
    """Return ``{name left out: name stored}`` of a file's, or an index's, metadata.

    Args:
        metadata: what it says.
        names: the tensors that are stored, in any file.
        what: the file, for messages.

    Raises:
        FormatError: our own entry is damaged, or contradicts what is stored.
    """
    ours = metadata.get(TIES_KEY)
    if ours is None:
        return {
            name: stored
            for name, stored in metadata.items()
            if isinstance(stored, str) and stored in names and name not in names and name not in _RESERVED
        }
    ties = decode_json(ours.encode(), f"{TIES_KEY} of {what}", floats=False) if isinstance(ours, str) else None
    if type(ties) is not dict:
        raise FormatError(f"cannot read {what}: its {TIES_KEY} does not map names to names", path=what)
    for name, stored in ties.items():
        if name in names or not isinstance(stored, str) or stored not in names:
            raise FormatError(
                f"cannot read {what}: it ties {name[:80]!r} to {str(stored)[:80]!r}; the first must not be stored, the "
                "second must",
                path=what,
            )
    return ties
