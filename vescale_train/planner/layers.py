"""The layers of a model that a plan may cut, read from its structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One matrix of a model and what it maps."""

    name: str
    kind: str
    """``linear`` or ``embedding``."""
    inputs: int
    outputs: int
    outputs_dim: int
    """The dim of its weight that the outputs lie along."""
    biased: bool

    @property
    def parent(self) -> str:
        """Name of the module that it is a child of."""
        return self.name.rpartition(".")[0]

    @property
    def inputs_dim(self) -> int:
        """The dim of its weight that the inputs lie along."""
        return 1 - self.outputs_dim


def layers_of(model: nn.Module) -> tuple[Layer, ...]:
    """Return the linear layers and embeddings of a model, in order; those inside attention modules of torch are not."""
    return tuple(_walk("", model))


def heads_of(model: nn.Module) -> tuple[int | None, int | None]:
    """Return how many heads there are of queries, and of keys and values; None where the model does not say."""
    places: list[Any] = [getattr(model, "config", None), *model.modules()]
    queries = _first(places, ("num_attention_heads", "n_head", "num_heads", "n_heads"))
    keys = _first(places, ("num_key_value_heads", "n_kv_heads", "num_kv_heads"))
    return queries, keys or queries


def _walk(name: str, module: nn.Module) -> Iterator[Layer]:
    if isinstance(module, nn.MultiheadAttention):  # uses its children's weights without calling them
        return
    layer = _layer(name, module)
    if layer is not None:
        yield layer
    for short, child in module.named_children():
        yield from _walk(f"{name}.{short}" if name else short, child)


def _layer(name: str, module: nn.Module) -> Layer | None:
    biased = getattr(module, "bias", None) is not None
    if isinstance(module, nn.Linear):
        return Layer(
            name=name,
            kind="linear",
            inputs=module.in_features,
            outputs=module.out_features,
            outputs_dim=0,
            biased=biased,
        )
    if isinstance(module, nn.Embedding):
        return Layer(
            name=name,
            kind="embedding",
            inputs=module.num_embeddings,
            outputs=module.embedding_dim,
            outputs_dim=1,
            biased=False,
        )
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # Hugging Face's linear layer of GPT-2
        weight: Any = module.weight
        inputs, outputs = weight.shape
        return Layer(name=name, kind="linear", inputs=inputs, outputs=outputs, outputs_dim=1, biased=biased)
    return None


def _first(places: list[Any], names: tuple[str, ...]) -> int | None:
    for place in places:
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int):
                return value
    return None
