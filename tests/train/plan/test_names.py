"""What a model offers to name."""

from __future__ import annotations

from torch import nn

from tests.train.plan.net import NAMES
from vescale_train.plan import Names


def test_a_tied_parameter_has_all_its_names_and_one_first():
    assert NAMES.shapes["head.weight"] == NAMES.shapes["words.weight"] == (40, 8)
    assert NAMES.tied["head.weight"] == NAMES.tied["words.weight"] == "words.weight"
    assert NAMES.tied["kinds.weight"] == "kinds.weight"


def test_edges_are_those_of_every_module_and_parameter():
    edges = NAMES.edges()
    assert {"input", "output", "layers.1.input", "layers.1.down_proj.output", "words.weight"} <= set(edges)
    assert len(edges) == 2 * len(NAMES.modules) + len(NAMES.shapes)


def test_a_forward_that_takes_anything_is_left_open():
    assert NAMES.takes["layers.0"] == ("x", "scale")

    class Any(nn.Module):
        def forward(self, *args):
            return args

    assert Names.of(Any()).takes == {}


def test_matrices_say_along_which_dim_their_inputs_lie():
    assert NAMES.inputs_dims["layers.0.up_proj.weight"] == 1
    assert NAMES.inputs_dims["words.weight"] == 0
    assert "norm.weight" not in NAMES.inputs_dims
