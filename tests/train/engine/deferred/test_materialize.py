import pytest
import torch
from torch import nn

from tests.train.engine import gpt
from tests.train.models import bert, gpt2, llama
from vescale_ckpt import Checkpointer, open_store
from vescale_train.engine.deferred import deferred_init, is_deferred, materialize
from vescale_train.errors import StateError


class Odd(nn.Module):
    """Slices written to, a constant, a buffer that is saved and one that is not, a parameter that is computed."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4, padding_idx=3)
        self.table = nn.Parameter(torch.arange(6.0).reshape(2, 3).t() * torch.tensor([2.0, 3.0]))
        self.register_buffer("mask", torch.ones(3, 3).tril())
        self.register_buffer("angles", 1.0 / torch.arange(1, 5), persistent=False)
        self.batch_norm = nn.BatchNorm1d(4)
        self.table.data[0].zero_()
        nn.init.trunc_normal_(self.embedding.weight.data[5:], std=0.1)


MODELS = {"gpt": gpt.GPT, "odd": Odd, "llama": llama, "gpt2": gpt2, "bert": bert}


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("name", MODELS)
def test_a_deferred_model_gets_the_bits_of_one_that_was_made_at_once(name):
    torch.manual_seed(5)
    want = MODELS[name]()
    after = torch.get_rng_state()
    model = deferred_init(MODELS[name])
    assert is_deferred(model)
    assert all(tensor.is_meta for tensor in model.parameters())
    torch.manual_seed(5)
    materialize(model)
    assert torch.equal(torch.get_rng_state(), after), "all random numbers were drawn, and no more"
    assert not is_deferred(model)
    found = tensors(model)
    assert found.keys() == tensors(want).keys(), "ties are kept"
    for key, tensor in tensors(want).items():
        assert torch.equal(found[key], tensor), key
        assert found[key].requires_grad == tensor.requires_grad


def test_no_more_than_a_parameter_or_two_is_there_at_once():
    """The constructor draws every layer, and the model's own initialisation draws it again at its end."""
    model = deferred_init(llama, num_hidden_layers=6)
    total = sum(tensor.nbytes for tensor in model.parameters())
    largest = max(tensor.nbytes for tensor in model.parameters())
    assert materialize(model) <= 3 * largest < total / 4


@pytest.mark.parametrize("name", ["odd", "llama"])
def test_straight_from_a_checkpoint_only_what_it_lacks_is_made(name, tmp_path):
    torch.manual_seed(5)
    want = MODELS[name]()
    model = deferred_init(MODELS[name])
    before = torch.get_rng_state()
    materialize(model, initialize=False)
    assert torch.equal(torch.get_rng_state(), before)
    with open_store(tmp_path) as store, Checkpointer(store, "run") as checkpointer:
        checkpointer.save(1, {"model": want})
        checkpointer.load({"model": model})
    for key, tensor in tensors(want).items():
        assert torch.equal(tensors(model)[key], tensor), key


def test_values_that_are_needed_at_once_are_refused():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))
            self.scale = self.weight.sum().item()

    with pytest.raises(StateError, match=r"needs values, which are not there yet"):
        deferred_init(Looks)


def test_a_model_that_is_not_deferred_is_refused():
    model = deferred_init(nn.Linear, 2, 2)
    materialize(model)
    for other in (model, nn.Linear(1, 1)):
        with pytest.raises(StateError, match="not made by deferred_init"):
            materialize(other)
