"""Every byte of every object of a small store is flipped, every object is cut, deleted: loads raise, or are right."""

from __future__ import annotations

import uuid

import pytest
import torch
from torch import nn

import vescale_ckpt as vc
from vescale_ckpt.errors import CorruptionError, VeScaleError
from vescale_ckpt.store import Store
from vescale_storage import loop
from vescale_storage.backends import open_backend
from vescale_storage.keys import manifest_key, pack_key, ref_key, tag_key
from vescale_storage.refs import set_tag
from vescale_storage.wrappers.faults import FaultBackend

SAMPLED_BYTES = 64 * 1024
NUM_SAMPLES = 300


def make(seed, steps):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.AdamW([model[1].weight], lr=0.01)  # the first layer is frozen: two saves share its chunks
    for _ in range(steps):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer, "values": {"step": steps, "name": "run"}, "rng": vc.PerRank(b"r")}
    return state | {"t": torch.full((2,), float(steps))}


def contents(state):
    """Return everything that a load fills."""
    tensors = {"t": state["t"].clone()}
    tensors |= {name: tensor.detach().clone() for name, tensor in state["model"].state_dict().items()}
    tensors |= {key: value.clone() for kept in state["optimizer"].state.values() for key, value in kept.items()}
    return tensors, dict(state["values"]), state["rng"].value


def same(one, other):
    return (
        one[0].keys() == other[0].keys()
        and all(torch.equal(tensor, other[0][name]) for name, tensor in one[0].items())
        and one[1:] == other[1:]
    )


async def _all(backend):
    return {info.key: await backend.get(info.key) async for info in backend.list("")}


class Small:
    """A store of two saves and a tag, and what each way of loading it must give."""

    def __init__(self):
        self.url = f"memory://{uuid.uuid4().hex}"
        self.expected = {}
        self.target = make(7, 1)
        self.backend = open_backend(self.url)
        with vc.open_store(self.url) as store, vc.Checkpointer(store, "r") as checkpointer:
            state = make(1, 1)
            for step in (1, 2):
                checkpointer.save(step, state)
                self.expected[step] = contents(state)
                state["model"](torch.randn(2, 3)).sum().backward()
                state["optimizer"].step()
                state["values"]["step"] += 1
                state["t"] += 1
            loop.run(set_tag(store.backend, "r", "best", 1, now=0.0))
        self.objects = loop.run(_all(self.backend))
        self.needed = {step: self._needed(step) for step in (1, 2)}
        self.needed["best"] = (self.needed[1] - {ref_key("r", 1, 1)}) | {tag_key("r", "best")}

    def _needed(self, step):
        """Return the keys of all objects that a load of a step reads."""
        snapshot = vc.open_store(self.url)[f"r@{step}"]
        packs = {pack_key(pack.name) for pack in snapshot.manifest.packs}
        return {"store.json", ref_key("r", step, 1), manifest_key(snapshot.ref.manifest), *packs}

    def put(self, key, content):
        loop.run(self.backend.delete(key) if content is None else self.backend.put(key, [content]))

    def load(self, what):
        """Load in a way of its own for a step and for a tag, from a store opened anew; return what came."""
        store = vc.open_store(self.url, create=False)
        if what == "best":
            state = store["r@best"].state_dict()
            model, moments = state["model"], state["optimizer"]["state"]["1.weight"]
            return {**model, **moments, "t": state["t"]}, state["values"], state["rng"][0]
        state = self.target
        with torch.no_grad():
            for tensor in (*state["model"].state_dict().values(), state["t"]):
                tensor.fill_(99)  # nothing right is left of the load before
        state["values"].update(step=-1, name="")
        state["rng"] = vc.PerRank(b"")
        try:
            vc.Checkpointer(store, "r").load(state, step=what)
        except VeScaleError as error:
            error.context["target"] = contents(state)
            raise
        return contents(state)

    def check(self, key, content, what, *, must_raise):
        """Put other content in place of an object, load, and put it back; return the error, if any."""
        self.put(key, content)
        try:
            found = self.load(what)
        except VeScaleError as error:
            return error
        finally:
            self.put(key, self.objects[key])
        step = 1 if what == "best" else what
        assert same(found, self.expected[step]), f"{key}: wrong data of {what} came back as a success"
        assert not must_raise, f"{key}: nothing was said of damage in it at a load of {what}"
        return None


@pytest.fixture(scope="module")
def small():
    return Small()


def positions(size):
    if size <= SAMPLED_BYTES:
        return range(size)
    return sorted({int(i * (size - 1) / NUM_SAMPLES) for i in range(NUM_SAMPLES + 1)})


def names_it(error, key):
    """Return whether an error names an object, or the tensor in it, or the snapshot that it makes unusable."""
    text = str(error)
    return any(word in text for word in (key, key.rpartition("/")[2], "cannot load '", "cannot open"))


def objects_of(small, kind):
    return sorted(key for key in small.objects if key.startswith(kind))


def test_the_store_is_small_and_sound(small):
    assert {key.partition("/")[0] for key in small.objects} == {*("store.json", "packs", "manifests", "refs", "index")}
    assert len(objects_of(small, "packs/")) == 2
    assert max(len(content) for content in small.objects.values()) < SAMPLED_BYTES
    for what in (1, 2, "best"):
        assert small.check("store.json", small.objects["store.json"], what, must_raise=False) is None
    assert not same(small.expected[1], small.expected[2])
    assert objects_of(small, "packs/")[0] in small.needed[2] or objects_of(small, "packs/")[1] in small.needed[2]


@pytest.mark.parametrize("what", [1, 2, "best"], ids=str)
@pytest.mark.parametrize("kind", ["store.json", "refs/", "manifests/", "packs/"])
def test_a_flipped_byte_anywhere_is_told_or_does_not_matter(small, kind, what):
    for key in objects_of(small, kind):
        content = small.objects[key]
        needed = key in small.needed[what]
        every = positions(len(content)) if needed else [0, len(content) // 2, len(content) - 1]
        for at in every[:: 5 if what == "best" else 1]:
            damaged = bytearray(content)
            damaged[at] ^= 1 << (at % 8)
            must_raise = needed and (kind != "packs/" or in_use(small, key, at, what))
            error = small.check(key, bytes(damaged), what, must_raise=must_raise)
            assert error is None or names_it(error, key), (key, at, str(error))
            assert needed or error is None, (key, at, str(error))


def in_use(small, key, at, what):
    """Return whether a byte of a pack is in a chunk that a load reads, or in the footer."""
    manifest = vc.open_store(small.url)[f"r@{what}"].manifest
    number = next(i for i, pack in enumerate(manifest.packs) if pack_key(pack.name) == key)
    rows = (manifest.chunks.pack == number).nonzero()[0]
    spans = [(int(manifest.chunks.offset[row]), int(manifest.chunks.length[row])) for row in rows]
    return any(start <= at < start + length for start, length in spans) or at >= footer_start(small, key)


def footer_start(small, key):
    content = small.objects[key]
    return len(content) - int.from_bytes(content[-16:-12], "little")


@pytest.mark.parametrize("what", [1, 2, "best"], ids=str)
def test_an_object_cut_anywhere_is_told(small, what):
    for key in sorted(small.needed[what]):
        content = small.objects[key]
        lengths = {0, 1, len(content) // 3, len(content) // 2, len(content) - 65, len(content) - 20, len(content) - 1}
        for length in sorted(n for n in lengths if 0 <= n < len(content)):
            error = small.check(key, content[:length], what, must_raise=True)
            assert names_it(error, key), (key, length, str(error))


@pytest.mark.parametrize("what", [1, 2, "best"], ids=str)
def test_an_object_with_more_than_was_written_is_told_or_does_not_matter(small, what):
    for key in sorted(small.needed[what]):
        error = small.check(key, small.objects[key] + b"\0", what, must_raise=not key.startswith("packs/"))
        assert error is None or names_it(error, key), (key, str(error))


@pytest.mark.parametrize("what", [1, 2, "best"], ids=str)
def test_an_object_that_is_gone_is_told(small, what):
    for key in sorted(small.needed[what]):
        error = small.check(key, None, what, must_raise=True)
        assert names_it(error, key) or "cannot find" in str(error), (key, str(error))
    for key in sorted(small.objects.keys() - small.needed[what]):
        assert small.check(key, None, what, must_raise=False) is None, key


@pytest.mark.parametrize("what", [1, 2])
def test_an_object_in_the_place_of_another_is_told(small, what):
    for kind in ("packs/", "manifests/", "refs/"):
        keys = objects_of(small, kind)
        for key, other in zip(keys, keys[1:] + keys[:1], strict=True):
            if key in small.needed[what]:
                error = small.check(key, small.objects[other], what, must_raise=True)
                assert names_it(error, key), (key, str(error))


def untouched(target):
    tensors, values, rng = target
    filled = {name: tensor for name, tensor in tensors.items() if name in {"t", "0.weight", "0.bias", "1.weight"}}
    return all(bool((tensor == 99).all()) for tensor in filled.values()) and values["step"] == -1 and rng == b""


def test_what_the_manifest_or_the_ref_can_tell_is_told_before_anything_is_touched(small):
    for key in sorted(small.needed[2]):
        if key.startswith("packs/"):
            continue
        damaged = bytearray(small.objects[key])
        damaged[len(damaged) // 2] ^= 1
        error = small.check(key, bytes(damaged), 2, must_raise=True)
        if "target" in error.context:  # else the store was not even opened
            assert untouched(error.context["target"]), key


def test_a_bad_chunk_says_which_targets_are_filled_and_verified_first_none_is(small):
    manifest = vc.open_store(small.url)["r@2"].manifest
    for row in range(len(manifest.chunks)):
        key = pack_key(manifest.packs[int(manifest.chunks.pack[row])].name)
        damaged = bytearray(small.objects[key])
        damaged[int(manifest.chunks.offset[row])] ^= 1
        error = small.check(key, bytes(damaged), 2, must_raise=True)
        assert isinstance(error, CorruptionError)
        filled = error.context["filled"]
        tensors, values, rng = error.context["target"]
        really = {name for name in ("0.weight", "0.bias", "1.weight") if not bool((tensors[name] == 99).all())}
        assert {f"model.{name}" for name in really} <= set(filled)
        assert ("already filled" in str(error)) == bool(filled)
        assert (values["step"], rng) == (-1, b""), "values come last"
        small.put(key, bytes(damaged))
        state = make(7, 0)
        with pytest.raises(CorruptionError, match="nothing of the state was changed"):
            vc.Checkpointer(vc.open_store(small.url), "r").load(state, step=2, verify_first=True)
        assert same(contents(state), contents(make(7, 0)))
        small.put(key, small.objects[key])


def test_a_damaged_index_costs_bytes_and_nothing_else(small):
    """The index is where a save finds chunks that are stored already: no byte of it may lead it astray."""
    before = set(small.objects)
    for key in objects_of(small, "index/"):
        content = small.objects[key]
        for damaged in ([flipped(content, at) for at in range(0, len(content), 9)], [content[:-1], b"", None]):
            for other in damaged:
                small.put(key, other)
                state, expected = make(1, 1), make(1, 1)
                with vc.open_store(small.url) as store, vc.Checkpointer(store, "other") as checkpointer:
                    checkpointer.save(5, state)
                    state["model"][0].weight.data.zero_()
                    checkpointer.load(state, step=5)
                assert same(contents(state), contents(expected)), key
                for made in loop.run(_all(small.backend)).keys() - before:
                    small.put(made, None)
                small.put(key, content)


def flipped(content, at):
    damaged = bytearray(content)
    damaged[at] ^= 1 << (at % 8)
    return bytes(damaged)


def test_verification_of_the_whole_store_finds_every_flip_in_a_pack_that_is_used(small):
    for key in objects_of(small, "packs/"):
        content = small.objects[key]
        for at in range(0, len(content), 7):
            damaged = bytearray(content)
            damaged[at] ^= 0x80
            small.put(key, bytes(damaged))
            store = vc.open_store(small.url)
            reports = [store[f"r@{step}"].verify() for step in (1, 2)]
            assert not all(report.ok for report in reports), (key, at)
            small.put(key, content)


def test_a_read_that_lies_once_is_asked_again_and_one_that_lies_twice_is_an_error(small):
    for times, fails in ((1, False), (2, True)):
        faults = FaultBackend(open_backend(small.url))
        rule = faults.corrupt("get_into", 3, prefix="packs/", times=times)
        store = Store(faults, exists=True)
        state = make(7, 0)
        if fails:
            with pytest.raises(CorruptionError, match="on two reads"):
                vc.Checkpointer(store, "r", read_options=vc.ReadOptions(num_workers=1)).load(state, step=1)
        else:
            vc.Checkpointer(store, "r", read_options=vc.ReadOptions(num_workers=1)).load(state, step=1)
            assert same(contents(state), small.expected[1])
        assert rule.num_hit == times
