"""How a large object is cut for a multipart upload: decided before the first byte is sent."""

from __future__ import annotations

from typing import Final

from vescale_storage.errors import InvalidInputError

MIN_PART_BYTES: Final = 5 * 2**20
"""S3 refuses smaller parts, except the last."""
MAX_PART_BYTES: Final = 5 * 2**30
MAX_PARTS: Final = 10_000
MAX_OBJECT_BYTES: Final = 5 * 2**40
"""What S3 and most servers that speak its protocol take as one object."""
PREFERRED_PART_BYTES: Final = 32 * 2**20
"""Large enough that requests cost little beside bytes, small enough that a lost one is sent again soon."""

_GRAIN_BYTES: Final = 2**20


def plan_parts(total_bytes: int | None, *, preferred_bytes: int = PREFERRED_PART_BYTES) -> int:
    """Return the part size for an object: every part but the last has it, and there are at most ``MAX_PARTS``.

    Args:
        total_bytes: size of the object; None when it is not known yet, and then any size that is allowed fits.
        preferred_bytes: part size as long as the object needs no larger one.

    Raises:
        InvalidInputError: the object is larger than ``MAX_OBJECT_BYTES``, or the preferred size is no valid part size.
    """
    if not MIN_PART_BYTES <= preferred_bytes <= MAX_PART_BYTES:
        raise InvalidInputError(
            f"cannot upload in parts of {preferred_bytes} bytes: S3 takes parts of {MIN_PART_BYTES} to {MAX_PART_BYTES}"
        )
    if total_bytes is None:
        total_bytes = MAX_OBJECT_BYTES
    if not 0 <= total_bytes <= MAX_OBJECT_BYTES:
        raise InvalidInputError(
            f"cannot upload {total_bytes} bytes as one object: S3 takes at most {MAX_OBJECT_BYTES}; split the object"
        )
    needed_bytes = -(-total_bytes // MAX_PARTS)
    # Whole mebibytes, so that equal objects are cut alike whatever their last bytes.
    return max(preferred_bytes, -(-needed_bytes // _GRAIN_BYTES) * _GRAIN_BYTES)
