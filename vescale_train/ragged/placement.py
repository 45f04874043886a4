"""``RaggedShard``: a tensor's leading dims, flattened, are cut in any proportion over a mesh axis.

Even shards of a dim must be torch's chunks; an optimizer that works on blocks, or a layer whose parameters are one flat
buffer, wants its cuts elsewhere. It is applied after all other axes: of what tensor parallelism leaves to a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Placement

from vescale_ckpt.layout.placement import Ragged
from vescale_train.errors import LayoutError


@dataclass(frozen=True)
class RaggedShard(Placement):
    """The leading dims are flattened and cut in proportion to ``local_units``, one number a rank; 0 holds nothing.

    The local tensor has the flattened dims as its first dim, then the others. What is cut must be a multiple of the sum
    of the units.
    """

    dims: tuple[int, ...]
    """``(0,)``, ``(0, 1)``, ..."""
    local_units: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(self.dims))
        object.__setattr__(self, "local_units", tuple(int(units) for units in self.local_units))
        if sum(self.local_units) < 1:
            raise LayoutError(f"{self}: no rank holds anything")
        self.checkpoint_placement()

    def checkpoint_placement(self) -> Ragged:
        """Return what a checkpoint calls this placement.

        Raises:
            LayoutError: the dims are not leading ones, or a number of units is negative.
        """
        return Ragged(self.dims, self.local_units)

    def is_partial(self, reduce_op: str | None = None) -> bool:  # noqa: ARG002 - torch's signature
        """Return False: nothing is left to be summed."""
        return False

    def is_replicate(self) -> bool:
        """Return False: each rank holds another part."""
        return False

    def is_shard(self, dim: int | None = None) -> bool:  # noqa: ARG002 - torch's signature
        """Return False: torch would take it for a shard of its own kind, and for whole rows."""
        return False
