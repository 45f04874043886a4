"""The stream of batches that a rank trains on; its state is the number of samples taken, whoever took them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from vescale_ckpt.errors import MismatchError
from vescale_train.data.order import Order, share
from vescale_train.errors import ConfigError, InvalidInputError, StateError
from vescale_train.mesh import batch_group
from vescale_train.torch_private import tree_map_only

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh


class MapDataset(Protocol):
    """A data set that says how many samples it has and gives any of them."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample."""


class Data:
    """An iterable of this rank's batches. Made by ``data``; iterating goes on from the state.

    Args:
        dataset: indexed by ints.
        order: which sample comes when.
        place: (data-parallel rank, number of data-parallel ranks).
        most_samples: the end of the run, counted in samples from its beginning; None: there is none.
        device: where tensors of the batches are put.
        loader_options: for torch's ``DataLoader``.
    """

    def __init__(
        self,
        dataset: MapDataset,
        order: Order,
        *,
        place: tuple[int, int] = (0, 1),
        most_samples: int | None = None,
        device: torch.device | None = None,
        loader_options: Mapping[str, Any] | None = None,
    ) -> None:
        rank, num_ranks = place
        if order.global_batch % num_ranks:
            raise ConfigError(
                f"cannot share global_batch={order.global_batch} among {num_ranks} data-parallel ranks: each takes as "
                f"many as the others; choose a multiple of {num_ranks}"
            )
        self.order = order
        self.next_sample = 0
        """How many samples the run has taken, over all ranks and epochs."""
        self._dataset = dataset
        self._rank = rank
        self._num_ranks = num_ranks
        self._most_samples = most_samples
        self._device = device
        self._loader_options = dict(loader_options or {})
        self._loads = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.order.epoch_of(self.next_sample)

    @property
    def num_steps_left(self) -> int | None:
        """How many batches are left; None if there is no end."""
        if self._most_samples is None:
            return None
        return max(0, self._most_samples - self.next_sample) // self.order.global_batch

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the end of the run, if it has one.

        The state counts a batch when it is yielded, however many were loaded ahead.

        Raises:
            StateError: a state was loaded while iterating: what was loaded ahead belongs to the old one.
        """
        loads = self._loads
        loader: DataLoader[Any] = DataLoader(
            self._dataset,  # type: ignore[arg-type]  # torch's class asks for less than its annotation
            batch_sampler=_Batches(self._ranges()),
            generator=torch.Generator().manual_seed(self.order.seed),  # or it would draw from the global one
            **self._loader_options,
        )
        for batch in loader:
            if self._loads != loads:
                raise StateError("a state was loaded into this data while iterating over it: begin a new iteration")
            self.next_sample += self.order.global_batch
            yield batch if self._device is None else to_device(batch, self._device)
            if self._loads != loads:
                raise StateError("a state was loaded into this data while iterating over it: begin a new iteration")

    def state_dict(self) -> dict[str, Any]:
        """Return all that another run needs to go on with the next sample, on any number of ranks."""
        order = self.order
        return {
            "seed": order.seed,
            "next_sample": self.next_sample,
            "num_samples": order.num_samples,
            "shuffle": order.shuffle,
            "end": order.end,
            "global_batch": order.global_batch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run was. The seed is that of the state: the order of the samples goes on too.

        Raises:
            InvalidInputError: that is no state of data.
            MismatchError: the data set has another length, or the order is made another way; lists all differences.
        """
        mine = self.state_dict()
        if set(state) != set(mine) or type(state["next_sample"]) is not int or state["next_sample"] < 0:
            raise InvalidInputError(f"not a state of vescale_train's data: {dict(state)}; it has {', '.join(mine)}")
        fixed = ["num_samples", "shuffle", "end"]
        if self.order.end == "drop":
            fixed.append("global_batch")  # another batch drops other samples, and an epoch ends elsewhere
        problems = [
            f"{name} is {mine[name]!r}, and {state[name]!r} in the state" for name in fixed if mine[name] != state[name]
        ]
        if problems:
            raise MismatchError("cannot go on with these data: " + "; ".join(problems), problems=tuple(problems))
        self.order = Order(
            num_samples=self.order.num_samples,
            global_batch=self.order.global_batch,
            seed=int(state["seed"]),
            shuffle=self.order.shuffle,
            end=self.order.end,
        )
        self.next_sample = state["next_sample"]
        self._loads += 1

    def _ranges(self) -> Iterator[list[int]]:
        size = self.order.global_batch
        for start in itertools.count(self.next_sample, size):
            if self._most_samples is not None and start + size > self._most_samples:
                return
            mine = share(self._rank, self._num_ranks, start, start + size)
            yield self.order.indices(*mine).tolist()


class _Batches:
    """Torch's ``DataLoader`` wants an iterable of lists of indices."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch, any pytree, with its tensors on a device; the host does not wait."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def data(
    dataset: MapDataset,
    mesh: DeviceMesh,
    *,
    global_batch: int,
    seed: int = 0,
    shuffle: bool = True,
    end: Literal["carry", "drop"] = "carry",
    steps: int | None = None,
    epochs: int | None = None,
    **loader_options: Any,
) -> Data:
    """Return this rank's stream of batches, which any mesh can go on with to the exact sample.

    Ranks that differ in ``dp`` or ``fsdp`` see different samples, ranks that differ in ``tp``, ``cp``, ``ep`` or ``pp``
    the same ones. Without ``steps`` and ``epochs`` the stream has no end; both count from the beginning of the run, so
    a resumed run makes what is left.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        mesh: from ``init``.
        global_batch: samples a step, over all ranks; the data-parallel ranks divide it.
        seed: of the order.
        shuffle: whether epochs have an order of their own; else samples come as they are.
        end: "carry" fills the last batch of an epoch from the next one, "drop" drops what does not fill one.
        steps: the run ends after so many batches.
        epochs: the run ends after so many epochs; with "carry", a rest that does not fill a batch is not trained on.
        loader_options: for torch's ``DataLoader``: ``collate_fn``, ``num_workers``, ``prefetch_factor``, ...

    Raises:
        ConfigError: a combination that cannot be.
        InvalidInputError: the data set cannot be indexed.
    """
    if isinstance(dataset, IterableDataset) or not all(hasattr(dataset, name) for name in ("__len__", "__getitem__")):
        raise InvalidInputError(
            f"cannot go to the exact sample of a {type(dataset).__name__}: it has no __len__ and __getitem__; wrap it "
            f"into a data set that is indexed by ints"
        )
    if steps is not None and epochs is not None:
        raise ConfigError(f"steps={steps} and epochs={epochs} both say when the run ends: give one of them")
    order = Order(num_samples=len(dataset), global_batch=global_batch, seed=seed, shuffle=shuffle, end=end)
    most = steps * global_batch if steps is not None else epochs * order.epoch_samples if epochs is not None else None
    group = batch_group(mesh)
    return Data(
        dataset,
        order,
        place=(0, 1) if group is None else (group.get_local_rank(), group.size()),
        most_samples=most,
        device=None if mesh.device_type == "cpu" else torch.device(mesh.device_type),
        loader_options=loader_options,
    )
