"""Agreement before a step: all pipeline ranks are about to run the same thing, or all of them raise."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from vescale_train.pipe.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_train.errors import VeScaleError
    from vescale_train.pipe.place import Place

T = TypeVar("T")
_FAILED = -1


def agree(place: Place, prepare: Callable[[], tuple[str, T]]) -> T:
    """Return what ``prepare`` made, once every rank has made it in the same form.

    One collective of eight bytes a rank; the forms themselves are exchanged only to tell how they differ.

    Args:
        place: of this rank; alone, it agrees with itself.
        prepare: returns the form of what it has made, a text, and the thing itself.

    Raises:
        BatchError: ranks were given different minibatches.
        VeScaleError: what a rank's ``prepare`` raised, on that rank; others raise ``BatchError`` with its text.
    """
    if place.group is None or place.num_ranks == 1:
        return prepare()[1]
    form, made, failure = "", None, None
    try:
        form, made = prepare()
    except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised again
        failure = error
    device = torch.device("cpu") if "gloo" in dist.get_backend(place.group) else torch.device("cuda")
    digest = _FAILED if failure else int.from_bytes(hashlib.sha256(form.encode()).digest()[:7], "little")
    everyone = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(place.num_ranks)]
    dist.all_gather(everyone, torch.tensor([digest], device=device), group=place.group)
    digests = [int(each.item()) for each in everyone]
    if len(set(digests)) == 1 and digests[0] != _FAILED and made is not None:
        return made
    texts: list[str] = [""] * place.num_ranks
    dist.all_gather_object(texts, f"{type(failure).__name__}: {failure}" if failure else form, group=place.group)
    if failure is not None:
        raise failure
    raise _disagreement(digests, texts)


def _disagreement(digests: list[int], texts: list[str]) -> VeScaleError:
    failed = {rank: texts[rank] for rank, digest in enumerate(digests) if digest == _FAILED}
    if failed:
        told = "\n".join(f"  pipeline rank {rank}: {text}" for rank, text in failed.items())
        return BatchError(f"cannot run this minibatch, other pipeline ranks cannot:\n{told}", ranks=tuple(failed))
    told = "\n".join(f"  pipeline rank {rank}: {text}" for rank, text in enumerate(texts))
    return BatchError(f"cannot run this minibatch: pipeline ranks were given different ones\n{told}")
