"""C026 to C034: dtypes that were cast, truncated or taken through something that does not know them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.cases.inputs import assert_same, bits, same_bits, spoil, tagged
from tests.cases.worlds import RUN, load, memory_store, save
from vescale_ckpt.errors import ConfigError, InvalidInputError, MismatchError
from vescale_ckpt.interop.safetensors import ExportOptions, check_target, export_snapshot, load_hf, plan_export
from vescale_ckpt.state.dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from vescale_ckpt.store import Store

torch_of_the_cases = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="what torch itself does was seen with 2.13"
)


def saved(state: object) -> Store:
    store = memory_store()
    save(store, 1, lambda _: state)
    return store


class TestC026CastsNobodyAskedFor:
    STATE: ClassVar = {"w": torch.linspace(-3, 3, 12).reshape(4, 3) * 100}

    @torch_of_the_cases
    @pytest.mark.filterwarnings("ignore")
    def test_torch_casts_without_a_word(self, tmp_path):
        dcp.save(self.STATE, checkpoint_id=tmp_path, no_dist=True)
        target = {"w": torch.zeros(4, 3, dtype=torch.bfloat16)}
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
        assert (target["w"].float() - self.STATE["w"]).abs().max() > 0.2

    @pytest.mark.parametrize(
        ("stored", "target"),
        [
            (torch.float32, torch.bfloat16),
            (torch.float32, torch.float64),
            (torch.int64, torch.int32),
            (torch.float32, torch.bool),
            (torch.bfloat16, torch.float16),
            (torch.float32, torch.int32),
            (torch.uint8, torch.int8),
            (torch.float8_e4m3fn, torch.float8_e5m2),
        ],
    )
    def test_here_it_is_an_error_unless_asked_for_and_then_reported(self, stored, target):
        store = saved({"a": {"w": self.STATE["w"].to(stored)}, "b": torch.ones(2)})
        state = {"a": {"w": torch.zeros(4, 3).to(target)}, "b": torch.zeros(2)}
        with pytest.raises(MismatchError) as caught:
            load(store, 1, lambda _: state)
        message = str(caught.value)
        assert "'a.w'" in message
        assert str(stored).removeprefix("torch.") in message
        assert str(target).removeprefix("torch.") in message
        assert not state["a"]["w"].float().any()
        assert not state["b"].any(), "nothing is touched"
        (report,) = load(store, 1, lambda _: state, cast=True)
        assert same_bits(state["a"]["w"], self.STATE["w"].to(stored).to(target))
        assert any("a.w" in note for note in report.notes)

    def test_shape_and_dtype_are_told_together(self):
        store = saved({"v": tagged(3), "w": tagged(4, 3), "x": tagged(2)})
        with pytest.raises(MismatchError) as caught:
            load(store, 1, lambda _: {"v": torch.zeros(4), "w": torch.zeros(4, 3).double(), "x": torch.zeros(2)})
        assert "'v'" in str(caught.value)
        assert "'w'" in str(caught.value)
        assert "'x'" not in str(caught.value)


def all_bytes(dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in which every byte value stands at every place of an item."""
    size = dtype.itemsize
    raw = torch.stack([(torch.arange(256) + 37 * i) % 256 for i in range(size)], dim=1).to(torch.uint8)
    return raw.reshape(-1).view(dtype)


class TestC028EveryDtypeByItsBytes:
    @pytest.mark.filterwarnings("ignore:ComplexHalf support")
    @pytest.mark.parametrize("name", sorted(DTYPE_NAMES - {"bool"}))
    def test_all_byte_values_come_back(self, name):
        full = all_bytes(getattr(torch, name))
        state = {"w": full, "two": full.reshape(2, -1), "scalar": full[7].clone()}
        store = saved(state)
        target = {key: value.clone() for key, value in state.items()}
        for value in target.values():
            spoil(value)
        load(store, 1, lambda _: target)
        assert_same(target, state)
        assert_same(store[RUN].state_dict(), state)
        assert store[RUN].tensors()["w"].num_bytes == full.numel() * full.dtype.itemsize

    def test_every_dtype_of_torch_is_stored_or_refused_by_name(self):
        every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        stored = {getattr(torch, name) for name in DTYPE_NAMES}
        assert {d for d in every if "float8" in str(d)} <= stored
        for dtype in every - stored:
            tensor = torch.empty(4, dtype=torch.uint8)
            try:
                odd = tensor.view(dtype)
            except (RuntimeError, TypeError):
                continue
            with pytest.raises((ConfigError, InvalidInputError), match="odd"):
                saved({"odd": odd})

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
    def test_payloads_of_nan_and_signs_of_zero_stay(self, dtype):
        values = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf")]).to(dtype)
        odd = values.clone()
        odd.view(torch.uint8).view(5, -1)[2, 0] ^= 1  # another payload
        store = saved({"a": values, "b": odd})
        assert_same(store[RUN].state_dict(), {"a": values, "b": odd})


def strided() -> dict[str, torch.Tensor]:
    x = tagged(4, 6)
    image = tagged(2, 3, 4, 5)
    return {
        "transposed": x.t(),
        "every_second_column": x[:, ::2],
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "permuted": image.permute(3, 0, 2, 1),
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "from_the_middle": tagged(100)[17:53].reshape(6, 6).t(),
        "large": tagged(700, 900).t(),
        "five_dims": tagged(2, 3, 2, 3, 2).transpose(1, 4),
    }


class TestC030Strides:
    def test_values_are_equal_and_the_target_may_be_strided_too(self, tmp_path):
        state = strided()
        store = saved({"model": state})
        target = {k: torch.zeros_like(v) if k != "expanded" else torch.zeros(2, 5) for k, v in state.items()}
        for key in ("transposed", "permuted", "large"):
            assert target[key].stride() == state[key].stride(), "zeros_like keeps strides"
        load(store, 1, lambda _: {"model": target})
        for key, value in state.items():
            assert torch.equal(target[key], value)
        snapshot = store[RUN]
        export_snapshot(snapshot, plan_export(snapshot.manifest, ExportOptions()), check_target(tmp_path / "hf"))
        files = load_file(next((tmp_path / "hf").glob("*.safetensors")))
        assert all(torch.equal(files[key], value) for key, value in state.items())

    def test_the_file_is_row_major_and_equal_content_has_one_key(self):
        state = strided()
        store = saved(state)
        (again,) = save(store, 1, lambda _: {k: v.contiguous() for k, v in state.items()}, step=2)
        assert again.bytes_deduplicated == again.bytes_total
        assert again.bytes_written == 0
        first, second = store[f"{RUN}@1"].manifest, store[f"{RUN}@2"].manifest
        assert (first.chunks.digest == second.chunks.digest).all()

    def test_conjugates_and_negatives_are_what_they_look_like(self):
        z = torch.complex(tagged(3, 3), tagged(3, 3, start=50))
        state = {"conj": z.conj(), "transposed": z.t().conj(), "imag": z.conj().imag}
        store = saved(state)
        found = store[RUN].state_dict()
        for key, value in state.items():
            assert torch.equal(bits(found[key]), bits(value))


class TestC032ExportKeepsDtypes:
    def test_native_to_safetensors_to_native(self, tmp_path):
        state = {
            "weight": tagged(5, 4).to(torch.bfloat16),
            "norm": torch.rand(4),
            "count": torch.tensor([2**60 + 1]),
            "mask": torch.tensor([True, False, True]),
            "half": torch.rand(3).half(),
            "fp8": all_bytes(torch.float8_e4m3fn),
        }
        snapshot = saved({"model": state})[RUN]
        export_snapshot(snapshot, plan_export(snapshot.manifest, ExportOptions()), check_target(tmp_path / "hf"))
        back = saved(load_hf(tmp_path / "hf"))[RUN].state_dict()["model"]
        assert back.keys() == state.keys()
        assert all(same_bits(back[key], value) for key, value in state.items())


def near_ties() -> torch.Tensor:
    """Return fp32 values around the ties of bfloat16, odd NaNs, infinities, subnormals and both zeros."""
    ties = torch.arange(0x3F80_8000, 0x3F88_8000, 0x1_0000, dtype=torch.int64)
    words = torch.cat([ties - 1, ties, ties + 1, -(2**31) + ties])
    odd = torch.tensor(
        [0x7F80_0001, 0x7FC0_0000, 0xFF80_0001, 0x7F80_0000, 0xFF80_0000, 1, 0x007F_FFFF, 0, 0x8000_0000]
    )
    words = torch.cat([words, odd, torch.tensor([0x7F7F_FFFF, 0x7F7F_7FFF])])
    return (words % 2**32).to(torch.uint32).view(torch.float32)


class TestC034CastsAreTorchsOwn:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_a_requested_cast_on_load(self, dtype):
        values = near_ties()
        store = saved({"w": values})
        target = {"w": torch.zeros(len(values), dtype=dtype)}
        load(store, 1, lambda _: target, cast=True)
        assert same_bits(target["w"], values.to(dtype))
        assert torch.equal(target["w"].isnan(), values.isnan())

    def test_a_requested_cast_on_export(self, tmp_path):
        values = near_ties()
        snapshot = saved({"model": {"w": values}})[RUN]
        plan = plan_export(snapshot.manifest, ExportOptions(dtype=torch.bfloat16))
        export_snapshot(snapshot, plan, check_target(tmp_path / "hf"))
        assert same_bits(load_hf(tmp_path / "hf")["model"]["w"], values.to(torch.bfloat16))
