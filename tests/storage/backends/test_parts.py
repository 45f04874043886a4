import pytest

from vescale_storage.backends.parts import (
    MAX_OBJECT_BYTES,
    MAX_PART_BYTES,
    MAX_PARTS,
    MIN_PART_BYTES,
    PREFERRED_PART_BYTES,
    plan_parts,
)
from vescale_storage.errors import InvalidInputError

MIB = 2**20


@pytest.mark.parametrize(
    ("total_bytes", "part_bytes"),
    [
        (0, PREFERRED_PART_BYTES),
        (1, PREFERRED_PART_BYTES),
        (5 * MIB, PREFERRED_PART_BYTES),
        (80 * 10**9, PREFERRED_PART_BYTES),
        (MAX_PARTS * PREFERRED_PART_BYTES, PREFERRED_PART_BYTES),
        (MAX_PARTS * PREFERRED_PART_BYTES + 1, PREFERRED_PART_BYTES + MIB),
        (5 * 2**40, 525 * MIB),
        (None, 525 * MIB),
    ],
)
def test_part_size(total_bytes, part_bytes):
    assert plan_parts(total_bytes) == part_bytes


@pytest.mark.parametrize(
    "total_bytes", [1, MIN_PART_BYTES, 10**9, 80 * 10**9, 10**12 + 1, 5 * 10**12, MAX_OBJECT_BYTES]
)
@pytest.mark.parametrize("preferred_bytes", [MIN_PART_BYTES, 7 * MIB + 3, PREFERRED_PART_BYTES, MAX_PART_BYTES])
def test_every_plan_keeps_the_limits(total_bytes, preferred_bytes):
    part_bytes = plan_parts(total_bytes, preferred_bytes=preferred_bytes)
    assert MIN_PART_BYTES <= part_bytes <= MAX_PART_BYTES
    assert part_bytes >= preferred_bytes
    assert -(-total_bytes // part_bytes) <= MAX_PARTS


@pytest.mark.parametrize("total_bytes", [MAX_OBJECT_BYTES + 1, 2**60, -1])
def test_an_object_too_large_is_refused(total_bytes):
    with pytest.raises(InvalidInputError, match=str(total_bytes)):
        plan_parts(total_bytes)


@pytest.mark.parametrize("preferred_bytes", [0, MIN_PART_BYTES - 1, MAX_PART_BYTES + 1])
def test_a_part_size_that_s3_refuses_is_refused(preferred_bytes):
    with pytest.raises(InvalidInputError, match=str(preferred_bytes)):
        plan_parts(1, preferred_bytes=preferred_bytes)
