from __future__ import annotations

import math
import uuid

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.distributed import simulated
from tests.distributed.threads import all_well, run_ranks
from tests.distributed.worlds import MESHES, shapes, spreads
from vescale_ckpt.adapters.options import RestoreOptions
from vescale_ckpt.execute.read import ReadOptions
from vescale_ckpt.execute.write import WriteOptions
from vescale_ckpt.geometry import tiles
from vescale_ckpt.loading.loader import Loader
from vescale_ckpt.saving.options import SaveOptions
from vescale_ckpt.saving.saver import Saver
from vescale_ckpt.state.dtypes import dtype_from_name
from vescale_ckpt.state.per_rank import PerRank
from vescale_ckpt.state.sharded_view import ShardedView
from vescale_ckpt.store import Store
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.pack import Codec

DTYPES = [
    dtype_from_name(name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    )
]


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Cut tensors of a few hundred bytes into many tiles, which the real bounds would leave whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "MIN_TILE_BYTES", 256)
        patch.setattr(tiles, "MIN_RUN_BYTES", 16)
        yield


def random_bits(dtype, shape, seed):
    """Return a tensor of random bits: NaN payloads, negative zeros, all codes."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    codes = 2 if dtype is torch.bool else 256
    count = math.prod(shape) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, codes, count, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def same_bits(a, b):
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    return a.shape == b.shape and (not len(a) or torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


@st.composite
def tensors(draw):
    """Draw (name, shape, dtype, content) of some tensors; now and then two have the same content."""
    found = []
    for number, shape in enumerate(draw(st.lists(shapes(3000), min_size=1, max_size=4))):
        dtype = draw(st.sampled_from(DTYPES))
        found.append((f"w{number}", shape, dtype, random_bits(dtype, shape, draw(st.integers(0, 2)))))
    return found


def held(data, drawn, mesh):
    return [data.draw(spreads(name, shape, mesh, dtype=dtype, full=full)) for name, shape, dtype, full in drawn]


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(tensors(), st.sampled_from(MESHES), st.sampled_from(MESHES), st.data())
def test_any_world_loads_what_any_world_saved_to_the_bit_and_reads_it_once(drawn, saved_mesh, loaded_mesh, data):
    backend = MemoryBackend(uuid.uuid4().hex)
    options = WriteOptions(
        pack_bytes=data.draw(st.sampled_from([1, 500, 1 << 20])), codec=data.draw(st.sampled_from(Codec))
    )
    saved = simulated.save(backend, held(data, drawn, saved_mesh), math.prod(saved_mesh), options=options)
    assert sum(w.bytes_total for w in saved.written) == sum(full.nbytes for *_, full in drawn)
    others = held(data, drawn, loaded_mesh)
    loaded = simulated.load(
        backend,
        saved.manifest,
        others,
        math.prod(loaded_mesh),
        round_bytes=data.draw(st.integers(1, 5000)),
        options=ReadOptions(span_bytes=data.draw(st.integers(1, 5000)), gap_bytes=data.draw(st.sampled_from([0, 100]))),
    )
    for rank, pieces in enumerate(loaded.pieces):
        wanted = [(other, box) for other in others for box in other.boxes[rank] if box.volume]
        for (other, box), piece in zip(wanted, pieces, strict=True):
            expected = other.full[box.slices] if box.shape else other.full
            assert same_bits(piece.view, expected), (other.name, box)
    read = [row for rows in loaded.rows_read for row in rows]
    assert len(read) == len(set(read))
    assert set(read) == {row for rows in loaded.rows_needed for row in rows}


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(tensors(), st.sampled_from(MESHES), st.data())
def test_what_is_stored_already_is_not_stored_again(drawn, mesh, data):
    backend = MemoryBackend(uuid.uuid4().hex)
    state = held(data, drawn, mesh)
    first = simulated.save(backend, state, math.prod(mesh))
    again = simulated.save(backend, state, math.prod(mesh), bases=[first.manifest], step=2)
    assert sum(w.bytes_put for w in again.written) == 0
    # Two ranks that wrote the same bytes left them in two packs; the second save may refer to either.
    assert set(again.manifest.packs) <= set(first.manifest.packs)
    for column in ("first", "tile", "digest", "partial_row", "partial_box"):
        assert np.array_equal(getattr(again.manifest.chunks, column), getattr(first.manifest.chunks, column))


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(tensors(), st.sampled_from(MESHES), st.sampled_from(MESHES), st.data())
def test_savers_and_loaders_of_many_ranks_do_the_same_together(drawn, saved_mesh, loaded_mesh, data):
    backend = MemoryBackend(uuid.uuid4().hex)
    saved, loaded = held(data, drawn, saved_mesh), held(data, drawn, loaded_mesh)
    values = data.draw(
        st.dictionaries(st.text(max_size=3), st.floats() | st.integers() | st.text(max_size=5), max_size=3)
    )

    def view(spread, rank, *, fill):
        pieces = []
        for box in spread.boxes[rank]:
            part = (spread.full[box.slices] if box.shape else spread.full).clone()
            pieces.append((box.offset, part if fill else torch.zeros_like(part)))
        return ShardedView(spread.shape, spread.dtype, pieces)

    def save(group):
        state = {t.name: view(t, group.rank, fill=True) for t in saved} | {"v": values, "r": PerRank(group.rank)}
        saver = Saver(Store(backend, exists=False), "run", group, SaveOptions(deadline_seconds=30.0))
        saver.save(1, state, blocking=data_blocking, bases=(), metadata={}).result()
        saver.close()

    def load(group):
        views = {t.name: view(t, group.rank, fill=False) for t in loaded}
        state = views | {"v": dict.fromkeys(values), "r": PerRank(None)}
        ignore = () if math.prod(loaded_mesh) == math.prod(saved_mesh) else ("r",)
        loader = Loader(Store(backend, exists=True), group, ReadOptions())
        loader.load(state, run="run", step=1, options=RestoreOptions(ignore=ignore))
        for spread in loaded:
            expected = view(spread, group.rank, fill=True)
            for (_, local), (_, right) in zip(views[spread.name].pieces, expected.pieces, strict=True):
                assert same_bits(local, right), spread.name
        assert repr(state["v"]) == repr(values)
        assert state["r"].value == (None if ignore else group.rank)

    data_blocking = data.draw(st.booleans())
    all_well(run_ranks(math.prod(saved_mesh), save))
    all_well(run_ranks(math.prod(loaded_mesh), load))
