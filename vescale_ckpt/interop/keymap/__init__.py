"""Key maps: small declarative files that say how the tensors of one naming become those of another."""

from vescale_ckpt.interop.keymap.rules import KeyMap, load_keymap, shipped_keymaps
from vescale_ckpt.interop.keymap.snapshot import MappedSnapshot

__all__ = ["KeyMap", "MappedSnapshot", "load_keymap", "shipped_keymaps"]
