import torch

from vescale_train.engine.deferred.record import Recording


def test_views_are_known_by_their_memory_and_need_no_operation():
    with Recording() as recording:
        base = torch.zeros(2, 3)
        row = base[1]
        row.fill_(2.0)
    record = recording.record
    names = [operation.call.__name__.partition(".")[0] for operation in record.operations]
    assert names == ["zeros", "fill_"]
    view = record.operations[1].outputs[0]
    assert (view.memory, view.shape, view.offset) == (0, (3,), 3)
    assert record.sizes == [24]


def test_constants_are_kept_as_they_were():
    constant = torch.ones(2)
    with Recording() as recording:
        made = torch.empty(2)
        made.copy_(constant)
        constant.add_(1)
    (kept,) = [leaf for leaf in recording.record.operations[-1].leaves if isinstance(leaf, torch.Tensor)]
    assert kept.tolist() == [1, 1]
    assert constant.tolist() == [2, 2]
