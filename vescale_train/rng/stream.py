"""Which numbers come next: a key for each draw, from the seed, the step, the module that draws, and how often it drew.

A draw that activation checkpointing repeats in the backward pass must give the numbers of the first one. Checkpointing
saves and restores the state of torch's default generator; so the position in the list of all draws is kept there, as
its seed, and a draw at a position that is in the list already is that draw again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from vescale_train.errors import ConfigError, StateError
from vescale_train.torch_private import is_in_backward

if TYPE_CHECKING:
    from vescale_train.rng.philox import Key
    from vescale_train.rng.place import Cut

_TAG = 0x5D1CE5
"""Marks the seeds that are positions of ours; any other seed was set by the user's code."""
_POSITION_BITS = 40
STATE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw: its key, and the parts of larger tensors that plain tensors were then."""

    name: str
    key: Key
    cuts: tuple[Cut, ...]


@dataclass(slots=True)
class Scope:
    """Counts draws by name; a micro-batch has a scope of its own, so that it counts from 0."""

    calls: dict[str, int] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = ()


class Stream:
    """The draws of one seed, step by step."""

    def __init__(self, seed: int) -> None:
        self.seed = checked_seed(seed)
        self.step = 0
        self.names: list[str] = []
        """The modules whose forward runs, and other named regions, innermost last."""
        self.scopes = [Scope()]
        self.samples: list[tuple[int, int, int]] = []
        """(dim, start, stop) of the micro-batches of this step."""
        self._draws: list[Draw] = []

    def next_draw(self) -> Draw:
        """Return the next draw, or the one that is repeated.

        Raises:
            StateError: a forward pass is repeated in the backward pass, but not from the state it began with.
        """
        found = torch.default_generator.initial_seed()
        tag, position = found >> _POSITION_BITS, found & ((1 << _POSITION_BITS) - 1)
        if tag != _TAG:
            self.reseed(found)
            position = 0
        name = self.names[-1] if self.names else ""
        if is_in_backward() and self.names:
            draw = self._repeated(position, name)
        else:
            position = len(self._draws)
            draw = self._new(name)
            self._draws.append(draw)
        self._mark(position + 1)
        return draw

    def reseed(self, seed: int) -> None:
        """Begin again with another seed, as ``torch.manual_seed`` does; the step stays."""
        self.seed = checked_seed(seed)
        self._forget()

    def start_step(self, step: int) -> None:
        """Begin a step: every name counts from 0 again, under the step's own keys."""
        if step < 0:
            raise ConfigError(f"a step is not negative; {step} was given", step=step)
        self.step = step
        self._forget()

    def state(self) -> dict[str, Any]:
        """Return what the next draws depend on, as plain values."""
        return {"format": STATE_FORMAT, "seed": self.seed, "step": self.step, "calls": dict(self.scopes[0].calls)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` returned.

        Raises:
            ConfigError: it is no such state.
        """
        try:
            version, seed, step, calls = (state[k] for k in ("format", "seed", "step", "calls"))
        except (KeyError, TypeError) as error:
            raise ConfigError(f"this is no state of random numbers: {error!r} in {state!r}") from error
        if version != STATE_FORMAT:
            raise ConfigError(f"the state of random numbers has format {version}; this version reads {STATE_FORMAT}")
        self.reseed(int(seed))
        self.start_step(int(step))
        self.scopes[0].calls.update({str(name): int(num) for name, num in calls.items()})

    def mark(self) -> None:
        """Put the position into torch's default generator."""
        self._mark(len(self._draws))

    def _new(self, name: str) -> Draw:
        scope = self.scopes[-1]
        call = scope.calls.get(name, 0)
        scope.calls[name] = call + 1
        return Draw(name, key_of(self.seed, self.step, name, call), scope.cuts)

    def _repeated(self, position: int, name: str) -> Draw:
        draw = self._draws[position] if position < len(self._draws) else None
        if draw is None or draw.name != name:
            first = f"drew in '{draw.name}'" if draw else "drew nothing"
            raise StateError(
                f"'{name}' draws random numbers in the backward pass of step {self.step}, where the forward pass "
                f"{first}: checkpoint with preserve_rng_state=True, and go back before the next step begins",
                fqn=name,
                step=self.step,
            )
        return draw

    def _forget(self) -> None:
        self._draws.clear()
        self.samples.clear()
        for scope in self.scopes:
            scope.calls.clear()
        self._mark(0)

    @staticmethod
    def _mark(position: int) -> None:
        torch.default_generator.manual_seed(_TAG << _POSITION_BITS | position)


def key_of(seed: int, step: int, name: str, call: int) -> Key:
    """Return the key of a draw: a hash, so that equal parts of different draws never meet."""
    text = f"{seed}/{step}/{call}/{name}"
    digest = hashlib.blake2b(text.encode(), digest_size=16, person=b"vescale rng").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def checked_seed(seed: int) -> int:
    """Return a seed that is one.

    Raises:
        ConfigError: it is not in ``[0, 2^64)``.
    """
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"a seed is at least 0 and less than 2^64; {seed} was given")
    return int(seed)
