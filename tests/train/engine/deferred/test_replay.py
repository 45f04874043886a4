import torch

from vescale_train.engine.deferred.record import Recording
from vescale_train.engine.deferred.replay import replay


def taken(record, wanted=None):
    found = {}

    def take(memory, tensor_of):
        views = [view for operation in record.operations for view in operation.outputs if view.memory == memory]
        found[memory] = tensor_of(views[0]).clone()

    peak = replay(record, take, wanted)
    return found, peak


def test_what_is_overwritten_is_let_go_before():
    with Recording() as recording:
        first = torch.empty(100).normal_()
        second = torch.empty(100).normal_()
        first.fill_(1.0)
        second.copy_(first)
    found, peak = taken(recording.record)
    assert peak == 800, "only while one is copied to the other"
    assert found[0].tolist() == found[1].tolist() == [1.0] * 100


def test_what_is_read_later_is_kept_though_part_of_it_is_overwritten():
    with Recording() as recording:
        first = torch.zeros(4)
        first[:2].fill_(3.0)
        first.mul_(2.0)
    assert taken(recording.record)[0][0].tolist() == [6, 6, 0, 0]


def test_only_what_a_memory_comes_from_is_done():
    with Recording() as recording:
        torch.empty(4).normal_()
        base = torch.arange(3.0)
        doubled = base * 2
    before = torch.get_rng_state()
    found, _ = taken(recording.record, {recording.record.view_of(doubled).memory})
    assert torch.equal(torch.get_rng_state(), before)
    assert [tensor.tolist() for tensor in found.values()] == [[0, 1, 2], [0, 2, 4]]
