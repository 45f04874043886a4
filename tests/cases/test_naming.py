"""C090 to C094: keys, containers and names of stores that were merged, lost or expanded."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import vescale_ckpt as vc
from tests.cases.inputs import assert_same, same_bits, tagged
from tests.cases.worlds import RUN, load, memory_store, save
from vescale_ckpt.errors import ConfigError, InvalidInputError, UnsupportedVersionError
from vescale_ckpt.execute.manifests import store_manifest
from vescale_ckpt.format import manifest as manifest_codec
from vescale_storage import loop, refs


def round_trip(state: object, target: object) -> vc.Store:
    store = memory_store()
    save(store, 1, lambda _: state)
    load(store, 1, lambda _: target)
    return store


class TestC090KeysWithSeparators:
    @pytest.mark.parametrize(
        "make",
        [
            lambda v: {"a.b": v(1), "a": {"b": v(2)}},
            lambda v: {"a.0": v(1), "a": [v(2)]},
            lambda v: {"a/b": v(1), "a": {"b": v(2)}, "a\\b": v(3)},
            lambda v: {"": v(1), "a": {"": v(2)}, "a.": v(3)},
            lambda v: {"0": v(1), 0: v(2)},
            lambda v: {"a": {"b.c": v(1), "b": {"c": v(2)}}, "a.b": {"c": v(3)}, "a.b.c": v(4)},
            lambda v: {"ключ": v(1), "é": v(2), "e\u0301": v(3), "\u0000": v(4), "😀": v(5), " ": v(6), "\n": v(7)},
            lambda v: {-1: v(1), 2**62: v(2), "state": {0: v(3), 1: v(4)}},
        ],
    )
    def test_both_survive(self, make):
        state, target = make(lambda n: torch.full((3,), float(n))), make(lambda _: torch.zeros(3))
        store = round_trip(state, target)
        assert_same(target, state)
        assert_same(store[RUN].state_dict(), state)
        assert len(store[RUN].tensors()) == len(_flat(state))


def _flat(state: object) -> list:
    if isinstance(state, dict):
        return [v for value in state.values() for v in _flat(value)]
    return [v for value in state for v in _flat(value)] if isinstance(state, list) else [state]


class TestC092Containers:
    def test_types_and_positions_come_back(self):
        t = tagged(3)
        state = {
            "a": [t, (t + 1, {"k": t + 2}), [], (), {}],
            "none": None,
            "int": 3,
            "big": 2**200,
            "float": 0.1,
            "odd": [float("inf"), -0.0, 5e-324],
            "str": "x",
            "bytes": b"\x00\xff",
            "bool": True,
            7: [None, (None,), [[(t + 3,)]]],
            "size": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
        }
        store = memory_store()
        save(store, 1, lambda _: state)
        found = store[RUN].state_dict()
        assert_same(found, state)
        assert type(found["a"]) is list
        assert type(found["a"][1]) is tuple
        assert found["a"][2:] == [[], (), {}]
        assert list(found) == list(state), "the order of keys"

    def test_the_state_of_an_optimizer_keeps_its_int_keys(self):
        state = {
            "state": {0: {"step": torch.tensor(4.0), "exp_avg": torch.ones(2)}, 1: {"step": torch.tensor(4.0)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}, {"lr": 5e-4, "params": [1]}],
        }
        target = {
            "state": {0: {"step": torch.tensor(0.0), "exp_avg": torch.zeros(2)}, 1: {"step": torch.tensor(0.0)}},
            "param_groups": [{"lr": 0.0, "betas": (0.0, 0.0), "params": [0]}, {"lr": 0.0, "params": [1]}],
        }
        round_trip(state, target)
        assert_same(target, state)

    def test_an_int_key_that_has_no_64_bits_is_refused_by_name(self):
        with pytest.raises(InvalidInputError, match=str(2**70)):
            save(memory_store(), 1, lambda _: {2**70: tagged(2)})

    def test_a_later_minor_version_is_read_and_a_later_major_is_refused_by_both_numbers(self, monkeypatch):
        store = memory_store()
        save(store, 1, lambda _: {"w": tagged(4)})
        manifest = store[RUN].manifest
        major, minor = manifest.version

        def commit(step: int, version: tuple[int, int]) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(manifest_codec, "FORMAT_VERSION", version)
                name = store_manifest(store.backend, dataclasses.replace(manifest, step=step))
            loop.run(
                refs.create_ref(store.backend, RUN, step, manifest=name, transaction=manifest.transaction, now=1.0)
            )

        commit(2, (major, minor + 1))
        assert same_bits(store[f"{RUN}@2"].read("w"), tagged(4))
        commit(3, (major + 1, 0))
        with pytest.raises(UnsupportedVersionError) as caught:
            load(store, 1, lambda _: {"w": torch.zeros(4)}, step=3)
        assert f"{major + 1}" in str(caught.value)
        assert f"{major}" in str(caught.value)


ODD_NAMES = ["a[0]", "star*", "what?", "hash#1", "percent%20", "white space", "ünïcode", "{x}", "~tilde", "a,b;c", "%"]


class TestC094NamesThatLookLikePatterns:
    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_runs_roots_and_tags_are_taken_literally(self, tmp_path, name):
        decoys = [f"{name}0", "a0", "star", "starx", "whatx"]
        for root in (str(tmp_path / name), f"memory://{tmp_path.name}-{name.replace('/', '')}".split("#")[0]):
            store = vc.open_store(root)
            for number, run in enumerate([name, *decoys]):
                save(store, 1, lambda _, number=number: {"w": torch.full((2,), float(number))}, run=run, step=number)
            assert sorted(store.runs()) == sorted({name, *decoys})
            assert [info.step for info in store.snapshots(name)] == [0]
            assert store[name].read("w").tolist() == [0.0, 0.0]
            target = {"w": torch.ones(2)}
            load(store, 1, lambda _, target=target: target, run=name)
            assert target["w"].tolist() == [0.0, 0.0]
        assert (tmp_path / name).is_dir()

    @pytest.mark.parametrize("name", ["", "a/b", "/", "..", ".", "a\x00b", "a@b", "x" * 201, "a\nb"])
    def test_what_cannot_be_taken_literally_is_refused_at_creation(self, name):
        store = memory_store()
        with pytest.raises(ConfigError):
            vc.Checkpointer(store, name)
