r"""The file of a key map: rules between the names of two sides, read in either direction.

TOML or JSON. A rule names tensors on both sides; ``{i}`` stands for one part between dots, the same on both sides::

    version = 1
    sides = ["hf", "megatron"]          # or the default, ["from", "to"]
    unmatched = "error"                 # or "keep", "drop": what no rule speaks of
    [settings]                          # numbers that layouts need: keys of config.json, the first that is there
    heads = ["num_attention_heads"]
    kv_heads = ["num_key_value_heads", "num_attention_heads"]
    [[rule]]                            # one to one: a rename
    hf = "model.norm.weight"
    megatron = "decoder.final_layernorm.weight"
    [[rule]]                            # several to one: fused one way, split the other
    hf = ["l.{i}.q.weight", "l.{i}.k.weight", "l.{i}.v.weight"]
    megatron = "l.{i}.qkv.weight"
    layout = "grouped_qkv"              # or "concat", the default
    [[rule]]
    hf = "l.{i}.inv_freq"               # nothing on the other side: dropped one way, absent the other
    [[cast]]
    match = '.*\.weight'               # a regular expression of target names
    dtype = "bfloat16"

More of a rule: ``transpose = true`` (matrices of the first side; vectors stay), ``name[1/3]`` (the second of three
equal parts along dim 0, after the transposition), ``rows = "vocab"`` (the first side has exactly as many rows as the
setting says; what is more on the other side is padding), ``regex = true`` (one direction only: the first side is a
regular expression, the other its replacement, with ``\1``).
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import ConfigError, NotFoundError
from vescale_ckpt.interop.safetensors.local import file_errors
from vescale_ckpt.state.dtypes import dtype_from_name

if TYPE_CHECKING:
    import torch

LAYOUTS: Final = frozenset({"concat", "grouped_qkv"})
UNMATCHED: Final = frozenset({"error", "keep", "drop"})
_RULE_FIELDS: Final = frozenset({"layout", "transpose", "rows", "regex"})
_TOP_FIELDS: Final = frozenset({"version", "description", "sides", "unmatched", "settings", "rule", "cast"})
_PART: Final = re.compile(r"(.*)\[(\d+)/(\d+)\]", re.DOTALL)
_HOLE: Final = re.compile(r"\{([a-z_]+)\}")
_MAX_FILE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a rule names, or an equal part of one."""

    pattern: str
    part: int = 0
    num_parts: int = 1

    def matcher(self) -> re.Pattern[str]:
        """Return what matches names, with a group for each hole."""
        pieces = _HOLE.split(self.pattern)
        text = "".join(re.escape(p) if i % 2 == 0 else f"(?P<{p}>[^.]+)" for i, p in enumerate(pieces))
        return re.compile(text)

    def name(self, holes: dict[str, str]) -> str:
        """Return the name with the holes filled."""
        return _HOLE.sub(lambda match: holes[match[1]], self.pattern)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, in the direction in which it is used."""

    sources: tuple[Operand, ...]
    targets: tuple[Operand, ...]
    layout: str = "concat"
    transpose: bool = False
    """Of the sources, before anything else."""
    transpose_after: bool = False
    """Of the targets, after everything else."""
    rows: str = ""
    """The setting that says how many rows the target has, where the source is padded."""
    regex: str = ""
    """A regular expression of source names; then ``targets`` has one replacement or none."""


@dataclass(frozen=True, slots=True)
class KeyMap:
    """Rules in one direction."""

    name: str
    rules: tuple[Rule, ...]
    casts: tuple[tuple[str, torch.dtype], ...] = ()
    """(regular expression of target names, dtype); the first that fits is used."""
    unmatched: str = "error"
    settings: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(setting, keys of the configuration)."""
    given: tuple[tuple[str, int], ...] = ()
    """Settings that the caller gave."""


def shipped_keymaps() -> tuple[str, ...]:
    """Return the names of the maps that come with this package: ``llama:hf->megatron``, ..."""
    found = []
    for entry in sorted(resources.files(__package__).joinpath("maps").iterdir(), key=lambda entry: entry.name):
        left, right = _sides(tomllib.loads(entry.read_text("utf-8")), entry.name)
        stem = entry.name.removesuffix(".toml")
        found += [f"{stem}:{left}->{right}", f"{stem}:{right}->{left}"]
    return tuple(found)


def load_keymap(name: str, settings: dict[str, int] | None = None) -> KeyMap:
    """Return a map: a shipped one, or a file's path, with ``:left->right`` behind it where the direction is not given.

    Args:
        name: ``llama:hf->megatron``, ``my.toml``, ``my.json:b->a``.
        settings: numbers that the source's ``config.json`` lacks or has wrong.

    Raises:
        NotFoundError: there is no such map.
        ConfigError: the file is no map, or has no such direction.
    """
    stem, colon, direction = name.rpartition(":")
    if not colon or "->" not in direction:
        stem, direction = name, ""
    raw = _read(stem)
    left, right = _sides(raw, stem)
    known = {f"{left}->{right}": (left, right), f"{right}->{left}": (right, left), "": (left, right)}
    if direction not in known:
        raise ConfigError(f"cannot use key map {name!r}: its directions are {left}->{right} and {right}->{left}")
    source, target = known[direction]
    rules = [_rule(fields, source, target, left, stem) for fields in raw.get("rule", ())]
    found = {key: (keys,) if isinstance(keys, str) else tuple(keys) for key, keys in raw.get("settings", {}).items()}
    return KeyMap(
        name,
        tuple(rule for rule in rules if rule is not None),
        tuple(_cast(fields, stem) for fields in raw.get("cast", ())),
        raw.get("unmatched", "error"),
        tuple(found.items()),
        tuple((settings or {}).items()),
    )


def _read(stem: str) -> dict[str, Any]:
    path = Path(stem)
    if "/" not in stem and path.suffix not in {".toml", ".json"}:
        shipped = resources.files(__package__).joinpath("maps", f"{stem}.toml")
        if not shipped.is_file():
            raise NotFoundError(f"cannot find key map {stem!r}: shipped are {', '.join(shipped_keymaps())}")
        return tomllib.loads(shipped.read_text("utf-8"))
    with file_errors("read", path), path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    try:
        raw = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot use key map {stem}: {error!s:.200}") from error
    if len(data) > _MAX_FILE_BYTES or not isinstance(raw, dict):
        raise ConfigError(f"cannot use key map {stem}: it is no table, or larger than {_MAX_FILE_BYTES} bytes")
    return raw


def _sides(raw: dict[str, Any], stem: str) -> tuple[str, str]:
    unknown = sorted(set(raw) - _TOP_FIELDS)
    sides = raw.get("sides", ["from", "to"])
    problem = ""
    if raw.get("version") != 1:
        problem = f"its version is {raw.get('version')!r}, 1 is known"
    elif unknown:
        problem = f"it has the fields {', '.join(unknown)}; known are {', '.join(sorted(_TOP_FIELDS))}"
    elif raw.get("unmatched", "error") not in UNMATCHED:
        problem = f"unmatched is one of {', '.join(sorted(UNMATCHED))}"
    elif not isinstance(sides, list) or len(set(map(str, sides))) != 2:
        problem = "sides are two different names"
    if problem:
        raise ConfigError(f"cannot use key map {stem}: {problem}")
    return str(sides[0]), str(sides[1])


def _rule(fields: dict[str, Any], source: str, target: str, left: str, stem: str) -> Rule | None:
    unknown = set(fields) - _RULE_FIELDS - {source, target}
    sources, targets = _operands(fields.get(source, ())), _operands(fields.get(target, ()))
    layout = fields.get("layout", "concat")
    problem = ""
    if unknown or layout not in LAYOUTS or not (sources or targets):
        problem = f"has the fields {sorted(fields)} and the layout {layout!r}"
    elif len(sources) > 1 and len(targets) > 1:
        problem = "has several tensors on both sides"
    elif layout == "grouped_qkv" and targets and max(len(sources), len(targets)) != 3:
        problem = "has the layout grouped_qkv, which takes q, k and v"
    elif fields.get("regex") and (len(sources) != 1 or len(targets) > 1):
        problem = "has regex and not one name"
    elif sources and targets and _holes(sources) != _holes(targets) and not fields.get("regex"):
        problem = "has other holes on one side than on the other"
    if problem:
        raise ConfigError(f"cannot use key map {stem}: the rule {str(fields)[:200]} {problem}")
    if fields.get("regex"):
        return Rule(sources, targets, regex=_checked(sources[0].pattern, stem)) if source == left else None
    if not sources:
        return None
    rows = str(fields.get("rows", "")) if target == left else ""
    transpose = bool(fields.get("transpose", False))
    return Rule(sources, targets, layout, transpose and source == left, transpose and source != left, rows)


def _holes(operands: tuple[Operand, ...]) -> set[str]:
    found = [set(_HOLE.findall(operand.pattern)) for operand in operands]
    return set.union(*found) if found else set()


def _operands(value: Any) -> tuple[Operand, ...]:
    found = []
    for text in [value] if isinstance(value, str) else value:
        match = _PART.fullmatch(text)
        found.append(Operand(match[1], int(match[2]), int(match[3])) if match else Operand(text))
    return tuple(found)


def _checked(pattern: str, stem: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"cannot use key map {stem}: {pattern!r} is no regular expression: {error}") from error
    return pattern


def _cast(fields: dict[str, Any], stem: str) -> tuple[str, torch.dtype]:
    if set(fields) != {"match", "dtype"}:
        raise ConfigError(f"cannot use key map {stem}: the cast {str(fields)[:200]} has not exactly match and dtype")
    return _checked(str(fields["match"]), stem), dtype_from_name(str(fields["dtype"]))
