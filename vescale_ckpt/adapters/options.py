"""What a load may do differently from "everything, exactly": the caller's permissions, each asked for by name."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreOptions:
    """What a load may differ in. Names are dotted; a name stands for everything below it, and may be a glob."""

    cast: bool = False
    """Fill a tensor of another dtype, by torch's own conversion."""
    only: tuple[str, ...] = ()
    """Load what has one of these names and leave the rest of the target as it is; empty: load everything."""
    ignore: tuple[str, ...] = ()
    """Leave these as they are in the target, whether stored or not, and accept them in the snapshot."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Name in the target -> name in the snapshot; the longest name that fits counts."""

    def __post_init__(self) -> None:
        for option in ("only", "ignore"):
            names = getattr(self, option)
            if isinstance(names, str) or not all(_is_name(name) for name in names):
                raise ConfigError(f"{option}={names!r} is not a tuple of names; write {option}=('model.head',)")
            object.__setattr__(self, option, tuple(names))
        if not all(_is_name(name) for pair in self.rename.items() for name in pair):
            raise ConfigError(f"rename={dict(self.rename)!r} does not map names to names")
        object.__setattr__(self, "rename", MappingProxyType(dict(self.rename)))


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name)


class Selector:
    """The options as questions about names; keeps count of what they matched."""

    def __init__(self, options: RestoreOptions) -> None:
        self.cast = options.cast
        self._only = _Patterns(options.only)
        self._ignore = _Patterns(options.ignore)
        self._rename = options.rename
        self._renamed: Counter[str] = Counter()

    def takes(self, name: str) -> bool:
        """Return whether a leaf of this name is to be loaded."""
        return not self._ignore.match(name) and self.names(name)

    def names(self, name: str) -> bool:
        """Return whether ``only`` has this name, ignored or not."""
        return not self._only or self._only.match(name)

    def ignores(self, name: str) -> bool:
        """Return whether ``ignore`` has this name."""
        return self._ignore.match(name)

    def renamed(self, name: str) -> str | None:
        """Return the name in the snapshot of a name in the target, None where it is the same."""
        if not self._rename:
            return None
        for end in (len(name), *(m.start() for m in reversed(list(re.finditer(r"\.", name))))):
            if (found := self._rename.get(name[:end])) is not None:
                self._renamed[name[:end]] += 1
                return found + name[end:]
        return None

    @property
    def renames(self) -> bool:
        """Whether any name is another one in the snapshot."""
        return bool(self._rename)

    def notes(self) -> Iterable[str]:
        """Yield what the names did, and which did nothing."""
        for option, patterns in (("only", self._only), ("ignore", self._ignore)):
            for pattern, count in patterns.counts():
                if option == "ignore" or not count:
                    yield f"{option} {pattern!r}: {count or 'no'} key{'' if count == 1 else 's'} here of this name"
        for name, stored in self._rename.items():
            did = "loaded" if self._renamed[name] else "nothing here of this name, not loaded"
            yield f"rename {name!r}: {did} from {stored!r}"


class _Patterns:
    """Names and globs, each for itself and all that is below it."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._names = {name for name in patterns if not _GLOB.search(name)}
        # "a.*" also for what is below a match of "a": a glob names subtrees like a plain name does
        self._globs = [
            (pattern, re.compile(f"{fnmatch.translate(pattern)}|{fnmatch.translate(pattern + '.*')}"))
            for pattern in patterns
            if _GLOB.search(pattern)
        ]
        self._patterns = patterns
        self._counts: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def match(self, name: str) -> bool:
        found = self._find(name) if self._patterns else None
        if found is not None:
            self._counts[found] += 1
        return found is not None

    def counts(self) -> Iterable[tuple[str, int]]:
        for pattern in self._patterns:
            yield pattern, self._counts[pattern]

    def _find(self, name: str) -> str | None:
        if name in self._names:  # a key may hold dots or brackets of its own
            return name
        if self._names:
            for dot in re.finditer(r"\.", name):
                if name[: dot.start()] in self._names:
                    return name[: dot.start()]
        return next((pattern for pattern, compiled in self._globs if compiled.fullmatch(name)), None)
