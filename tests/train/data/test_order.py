import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.data.order import Order, share
from vescale_train.errors import ConfigError, InternalError


@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 9))
def test_every_epoch_has_every_sample_once(num_samples, global_batch, epoch):
    order = Order(num_samples=num_samples, global_batch=global_batch, seed=5)
    found = order.indices(epoch * num_samples, (epoch + 1) * num_samples)
    assert sorted(found.tolist()) == list(range(num_samples))
    assert order.epoch_of((epoch + 1) * num_samples) == epoch + 1


@given(st.data())
def test_dropping_leaves_out_what_does_not_fill_a_batch(drawn):
    num_samples = drawn.draw(st.integers(1, 50))
    global_batch = drawn.draw(st.integers(1, num_samples))
    order = Order(num_samples=num_samples, global_batch=global_batch, seed=5, end="drop")
    for epoch in range(3):
        found = order.indices(epoch * order.epoch_samples, (epoch + 1) * order.epoch_samples).tolist()
        assert len(set(found)) == num_samples - num_samples % global_batch


@given(st.integers(0, 300), st.lists(st.integers(0, 40), max_size=6))
def test_a_stretch_is_the_same_in_pieces(start, lengths):
    order = Order(num_samples=23, global_batch=4, seed=1)
    pieces, at = [], start
    for length in lengths:
        pieces += order.indices(at, at + length).tolist()
        at += length
    assert order.indices(start, at).tolist() == pieces


def test_without_shuffling_samples_come_as_they_are():
    order = Order(num_samples=5, global_batch=2, seed=9, shuffle=False)
    assert order.indices(3, 12).tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_the_seed_makes_the_order():
    one, other = (Order(num_samples=99, global_batch=2, seed=seed).indices(0, 99).tolist() for seed in (0, 1))
    assert one != other


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 1000))
def test_shares_are_neighbours_in_order_of_ranks(num_ranks, each, start):
    stop = start + num_ranks * each
    parts = [share(rank, num_ranks, start, stop) for rank in range(num_ranks)]
    assert [at for part in parts for at in range(*part)] == list(range(start, stop))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_samples": 0}, "a data set of 0 samples"),
        ({"global_batch": 0}, "batches of 0 samples"),
        ({"end": "pad"}, "end='pad'"),
        ({"end": "drop", "global_batch": 11}, "every epoch would be dropped whole"),
    ],
)
def test_impossible_orders_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        Order(**{"num_samples": 10, "global_batch": 2, "seed": 0} | settings)


def test_a_stretch_that_is_none_is_a_bug():
    with pytest.raises(InternalError):
        Order(num_samples=10, global_batch=2, seed=0).indices(5, 4)
