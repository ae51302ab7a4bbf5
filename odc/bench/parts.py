"""What `odc bench` measures, by name. Loads no torch, so that the command line can name it at once."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Part:
    """One part of the suite."""

    function: str  # "module:function"; makes its actions, on every rank
    copies: int = 3  # of its size that it holds on one rank at once, at most; to refuse what does not fit
    on: Literal["cpu", "cuda"] | None = None  # the only device it is measured on

    def prepare(self) -> Callable[[int, str], list[Any]]:
        """The function; loads torch."""
        found: Callable[[int, str], list[Any]] = pkgutil.resolve_name(f"odc.bench.{self.function}")
        return found


PARTS: dict[str, Part] = {
    "get": Part("heaps:get", 6),
    "put": Part("heaps:put", 7),
    "accumulate": Part("sharded:accumulate", 13),
    "publish": Part("sharded:publish", 10),
    "publish-cast": Part("sharded:publish_cast", 14),
    "signal": Part("heaps:signal"),
    "gather": Part("sharded:gather", 8),
    "push": Part("sharded:push", 11),
    "host": Part("alone:host"),
    "minibatch": Part("sharded:minibatch", 6),
    "exchange": Part("dispatching:exchange", 24, on="cpu"),
    "planners": Part("dispatching:planners", on="cpu"),
    "add": Part("heaps:add", 9, on="cuda"),
}


@dataclass(frozen=True)
class Effort:
    """How many rounds: as many as move `nbytes`, within bounds."""

    nbytes: int = 1 << 30
    least: int = 5
    most: int = 50
    warm: int = 2
    planned: tuple[int, ...] = (512, 4096)  # samples of a minibatch to plan

    def rounds(self, nbytes: int) -> int:
        """For actions of `nbytes`."""
        return max(self.least, min(self.most, self.nbytes // max(1, nbytes)))


THOROUGH = Effort()
QUICK = Effort(nbytes=64 << 20, least=3, most=10, warm=1, planned=(512,))
