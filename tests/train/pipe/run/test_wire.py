from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.errors import InternalError, InvalidInputError
from vescale_train.pipe.run.wire import Wire, arrived, decode, empty, encode, fills_memory, flat, form_of_tensor

CPU = torch.device("cpu")


@st.composite
def tensors(draw):
    """Draw a tensor that is contiguous, permuted, strided, expanded or empty."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    match draw(st.integers(0, 2)):
        case 0:
            return tensor
        case 1 if tensor.ndim:
            return tensor[::2]
        case _:
            return tensor.unsqueeze(0).expand(3, *tensor.shape)


@given(tensors())
def test_a_tensor_arrives_with_its_values_and_where_it_can_with_its_strides(tensor):
    (form,) = decode(encode([form_of_tensor(tensor)]))
    assert form == form_of_tensor(tensor)
    buffer = empty(form, CPU)
    buffer.as_strided((buffer.numel(),), (1,)).copy_(flat(tensor, form))
    got = arrived(buffer, form, None)
    assert got.dtype == tensor.dtype
    assert torch.equal(got, tensor)
    if fills_memory(tensor):
        assert got.stride() == tensor.stride()


def test_headers_keep_none_and_whether_gradients_are_wanted():
    forms = [None, form_of_tensor(torch.ones(2, requires_grad=True)), form_of_tensor(torch.ones(2))]
    assert decode(encode(forms)) == forms
    assert [form and form.needs_grad for form in forms] == [None, True, False]


def wire_that_agreed(*tensors):
    wire = Wire(1, None, CPU, None)
    wire._agreed["key"] = [None if tensor is None else form_of_tensor(tensor) for tensor in tensors]
    return wire


@pytest.mark.parametrize(
    ("agreed", "sent", "reason"),
    [
        ([None], [torch.ones(2)], "it was None in the first micro-batch"),
        ([torch.ones(2)], [torch.ones(3)], "the receiver counts on it"),
        ([torch.ones(2)], [torch.ones(2).double()], "the receiver counts on it"),
    ],
)
def test_what_the_receiver_does_not_count_on_is_not_sent(agreed, sent, reason):
    with pytest.raises(InvalidInputError, match=reason):
        wire_that_agreed(*agreed).send("key", sent)


def test_a_sharded_tensor_needs_its_mesh_on_the_other_side():
    form = form_of_tensor(torch.ones(2))
    there = type(form)(shape=(2,), stride=(1,), dtype=torch.float32, needs_grad=False, axes=("tp",), placements=("S0",))
    with pytest.raises(InternalError, match="this stage's mesh is None"):
        arrived(torch.ones(2), there, None)
