import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from vescale_ckpt.errors import MismatchError
from vescale_train.data import stream
from vescale_train.data.order import Order
from vescale_train.data.stream import Data, data, to_device
from vescale_train.errors import ConfigError, InvalidInputError, StateError

NUMBERS = range(23)


def ranks(num_ranks, *, state=None, **more):
    order = Order(**{"num_samples": 23, "global_batch": 4, "seed": 0} | more)
    made = [Data(NUMBERS, order, place=(rank, num_ranks)) for rank in range(num_ranks)]
    for one in made:
        if state is not None:
            one.load_state_dict(state)
    return made


def take(made, num_steps):
    """Return the samples of the next steps, as the ranks saw them together."""
    iterators = [iter(one) for one in made]
    return [[int(x) for iterator in iterators for x in next(iterator)] for _ in range(num_steps)]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_number_of_ranks_goes_on_to_the_exact_sample(drawn):
    """Over epochs' ends, by any way of changing the number of ranks on the way, and whatever seed a restart brings."""
    end = drawn.draw(st.sampled_from(["carry", "drop"]))
    undisturbed = take(ranks(1, end=end), 20)
    seen, state = [], None
    while len(seen) < 20:
        num_ranks = drawn.draw(st.sampled_from([1, 2, 4]))
        made = ranks(num_ranks, state=state, end=end, seed=0 if state is None else drawn.draw(st.integers(0, 9)))
        seen += take(made, drawn.draw(st.integers(1, min(8, 20 - len(seen)))))
        states = [one.state_dict() for one in made]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert seen == undisturbed


def test_another_batch_size_goes_on_with_the_next_sample():
    small = ranks(1)
    seen = flat(take(small, 7))
    large = ranks(2, state=small[0].state_dict(), global_batch=10)
    seen += flat(take(large, 2))
    order = Order(num_samples=23, global_batch=1, seed=0)
    assert seen == order.indices(0, 48).tolist()


@pytest.mark.parametrize("end", ["carry", "drop"])
@pytest.mark.parametrize("stop", range(16))
def test_a_run_of_three_epochs_makes_all_its_steps_wherever_it_was_interrupted(end, stop):
    mesh = SimpleNamespace()
    full = made(mesh, end=end, epochs=3)
    num_steps = full.num_steps_left
    assert num_steps == {"carry": 17, "drop": 15}[end]
    everything = [batch.tolist() for batch in full]
    assert len(everything) == num_steps
    first = made(mesh, end=end, epochs=3)
    seen = [batch.tolist() for batch in itertools.islice(first, min(stop, num_steps))]
    second = made(mesh, end=end, epochs=3, seed=99)
    second.load_state_dict(first.state_dict())
    assert second.num_steps_left == num_steps - len(seen)
    seen += [batch.tolist() for batch in second]
    assert seen == everything
    assert list(second) == []


@pytest.fixture(autouse=True)
def _no_group(monkeypatch):
    monkeypatch.setattr(stream, "batch_group", lambda mesh: getattr(mesh, "batch_group", None))


def made(mesh, **more):
    mesh.device_type = "cpu"
    return data(NUMBERS, mesh, **{"global_batch": 4} | more)


def test_ranks_of_a_mesh_take_their_shares():
    shares = []
    for rank in range(2):
        group = SimpleNamespace(get_local_rank=lambda rank=rank: rank, size=lambda: 2)
        shares.append(next(iter(made(SimpleNamespace(batch_group=group), shuffle=False, steps=3))).tolist())
    assert shares == [[0, 1], [2, 3]]


def test_a_batch_that_ranks_cannot_share_is_refused():
    group = SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 3)
    with pytest.raises(ConfigError, match=r"global_batch=4 among 3 data-parallel ranks.*a multiple of 3"):
        made(SimpleNamespace(batch_group=group))


def test_there_is_no_end_unless_one_is_given():
    assert made(SimpleNamespace()).num_steps_left is None
    assert made(SimpleNamespace(), steps=3).num_steps_left == 3
    with pytest.raises(ConfigError, match="give one of them"):
        made(SimpleNamespace(), steps=3, epochs=1)


def test_the_epoch_is_told():
    stream_of_one = ranks(1)[0]
    epochs = [stream_of_one.epoch for _ in itertools.islice(stream_of_one, 12)]
    assert epochs == [0] * 5 + [1] * 6 + [2]


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.count()


@pytest.mark.parametrize("dataset", [Endless(), iter([1, 2]), 5])
def test_data_that_cannot_be_indexed_are_refused(dataset):
    with pytest.raises(InvalidInputError, match="it has no __len__ and __getitem__"):
        data(dataset, SimpleNamespace(device_type="cpu"), global_batch=2)


def test_a_state_that_does_not_fit_is_refused_with_all_that_differs():
    state = ranks(1)[0].state_dict()
    other = Data(range(24), Order(num_samples=24, global_batch=4, seed=0, shuffle=False))
    with pytest.raises(MismatchError, match="num_samples is 24, and 23 in the state; shuffle is False") as caught:
        other.load_state_dict(state)
    assert len(caught.value.problems) == 2
    assert other.next_sample == 0
    with pytest.raises(MismatchError, match="global_batch is 8"):
        ranks(1, global_batch=8, end="drop")[0].load_state_dict(state | {"end": "drop"})


@pytest.mark.parametrize("change", [{"next_sample": -1}, {"next_sample": 1.5}, {"more": 1}])
def test_what_is_no_state_is_refused(change):
    one = ranks(1)[0]
    with pytest.raises(InvalidInputError, match="not a state"):
        one.load_state_dict(one.state_dict() | change)
    with pytest.raises(InvalidInputError, match="not a state"):
        one.load_state_dict({})


def test_an_iteration_that_a_load_overtakes_says_so():
    one = ranks(1)[0]
    iterator = iter(one)
    next(iterator)
    one.load_state_dict(one.state_dict() | {"next_sample": 0})
    with pytest.raises(StateError, match="begin a new iteration"):
        next(iterator)
    assert one.next_sample == 0


def test_loading_ahead_in_other_processes_counts_what_was_yielded_and_draws_no_random_numbers():
    dataset = TensorDataset(torch.arange(23))
    before = torch.get_rng_state()
    plain = [batch.tolist() for (batch,) in itertools.islice(Data(dataset, ranks(1)[0].order), 6)]
    ahead = Data(dataset, ranks(1)[0].order, loader_options={"num_workers": 1, "prefetch_factor": 4})
    assert [batch.tolist() for (batch,) in itertools.islice(ahead, 6)] == plain
    assert ahead.next_sample == 24
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_of_any_shape_go_to_the_device():
    batch = {"x": torch.ones(2), "more": [torch.zeros(1), "text"]}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"].device.type == "meta"
    assert moved["more"][0].device.type == "meta"
    assert moved["more"][1] == "text"
