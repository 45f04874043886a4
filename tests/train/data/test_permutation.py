import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.data.permutation import permute
from vescale_train.errors import InvalidInputError

SEEDS = st.integers(-(2**63), 2**64)


def order(size, seed=0, epoch=0):
    return permute(np.arange(size), size, seed=seed, epoch=epoch).tolist()


@given(st.integers(1, 600), SEEDS, st.integers(0, 10**6))
def test_every_number_comes_once(size, seed, epoch):
    assert sorted(order(size, seed, epoch)) == list(range(size))


@given(st.integers(1, 10**12), st.lists(st.floats(0, 1, exclude_max=True), max_size=20), SEEDS)
def test_any_position_of_the_largest_order_is_found_by_itself(size, parts, seed):
    positions = np.array([int(part * size) for part in parts], dtype=np.int64)
    together = permute(positions, size, seed=seed, epoch=3)
    alone = [int(permute(positions[[at]], size, seed=seed, epoch=3)[0]) for at in range(len(positions))]
    assert together.tolist() == alone
    assert all(0 <= value < size for value in alone)
    assert len(set(alone)) == len(set(positions.tolist()))


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = [order(100, seed, epoch) for seed in (0, 1, 2**40) for epoch in (0, 1, 2)]
    assert len({tuple(one) for one in orders}) == len(orders)
    shifted = [order(100, 1, 0), order(100, 0, 1)]
    assert shifted[0] != shifted[1]


def test_an_order_is_well_mixed():
    """Of random orders of 1000, the place of a number is off from its value by a third on average."""
    for seed in range(20):
        found = np.array(order(1000, seed))
        assert abs(np.abs(found - np.arange(1000)).mean() - 1000 / 3) < 40
        assert abs(np.corrcoef(found, np.arange(1000))[0, 1]) < 0.15
        assert np.sum(np.diff(found) == 1) < 10


def test_first_places_are_fair():
    """Each of 8 numbers is first about as often as any other, over 4000 orders."""
    first = [int(permute(np.zeros(1, dtype=np.int64), 8, seed=seed, epoch=0)[0]) for seed in range(4000)]
    assert np.bincount(first, minlength=8).min() > 400
    assert np.bincount(first, minlength=8).max() < 600


def test_orders_never_change():
    """A checkpoint holds a position only: with another order, a resumed run would see samples twice or never."""
    assert order(10, 0, 0) == FROZEN[0]
    assert order(10, 0, 1) == FROZEN[1]
    assert permute(np.array([0, 1, 10**9]), 10**10, seed=2**63, epoch=7).tolist() == FROZEN[2]


FROZEN = (
    [4, 6, 9, 0, 8, 2, 5, 3, 7, 1],
    [9, 4, 5, 2, 0, 7, 3, 6, 8, 1],
    [8317938976, 4581977034, 5036575942],
)


@pytest.mark.parametrize("positions", [[-1], [0, 5]])
def test_positions_outside_are_refused(positions):
    with pytest.raises(InvalidInputError, match="an order of 5 samples"):
        permute(np.array(positions), 5, seed=0, epoch=0)
