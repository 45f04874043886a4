from __future__ import annotations

import pytest

from vescale_ckpt.adapters.options import RestoreOptions, Selector
from vescale_ckpt.errors import ConfigError


def takes(name, **options):
    return Selector(RestoreOptions(**options)).takes(name)


def test_everything_is_taken_by_default():
    assert takes("model.w")
    assert Selector(RestoreOptions()).renamed("model.w") is None
    assert list(Selector(RestoreOptions()).notes()) == []


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("model", "model", True),
        ("model", "model.w", True),
        ("model", "model2.w", False),
        ("model.w", "model", False),
        ("model.*.bias", "model.a.b.bias", True),
        ("model.*.bias", "model.a.weight", False),
        ("model.layers.[01]", "model.layers.1.weight", True),
        ("model.layers.[01]", "model.layers.2.weight", False),
        ("*.step", "opt.state.w.step", True),
        ("a?", "ab.c", True),
        ("w[0]", "w[0]", False),  # a glob: it is a class of one character
        ("w[[]0]", "w[0]", True),
        ("a.b", "a.b.c.d", True),
    ],
)
def test_a_name_stands_for_everything_below_it(pattern, name, expected):
    assert takes(name, only=(pattern,)) is expected
    assert takes(name, ignore=(pattern,)) is not expected


def test_ignore_wins_over_only():
    assert not takes("model.head.w", only=("model",), ignore=("model.head",))
    assert takes("model.body.w", only=("model",), ignore=("model.head",))


def test_the_longest_rename_counts():
    selector = Selector(RestoreOptions(rename={"model": "net", "model.enc": "encoder", "model.enc.w": "x.y"}))
    assert selector.renamed("model") == "net"
    assert selector.renamed("model.dec.w") == "net.dec.w"
    assert selector.renamed("model.enc.b") == "encoder.b"
    assert selector.renamed("model.enc.w") == "x.y"
    assert selector.renamed("model.encoder.w") == "net.encoder.w"
    assert selector.renamed("opt") is None


def test_notes_tell_what_names_did():
    selector = Selector(RestoreOptions(only=("model", "nothing"), ignore=("model.head",), rename={"a": "b", "c": "d"}))
    assert selector.takes("model.w")
    assert not selector.takes("model.head.w")
    assert selector.renamed("a.x") == "b.x"
    notes = "\n".join(selector.notes())
    assert "only 'nothing': no keys" in notes
    assert "only 'model':" not in notes
    assert "ignore 'model.head': 1 key " in notes
    assert "rename 'a': loaded from 'b'" in notes
    assert "rename 'c': nothing here" in notes


@pytest.mark.parametrize(
    "options",
    [
        {"only": "model"},
        {"ignore": "model"},
        {"only": ("",)},
        {"ignore": (1,)},
        {"rename": {"a": ""}},
        {"rename": {1: "a"}},
    ],
)
def test_what_is_no_name_is_refused(options):
    with pytest.raises(ConfigError):
        RestoreOptions(**options)


def test_options_do_not_change_with_the_callers_dict():
    renames = {"a": "b"}
    options = RestoreOptions(rename=renames, only=["x"])
    renames["c"] = "d"
    assert dict(options.rename) == {"a": "b"}
    assert options.only == ("x",)
