"""What `fully_shard` was called with, by module.

Chose weak references held outside the modules over attributes on them: a module that is deleted takes its entry along,
and nothing of odc shows up in a state dict, a pickle or `dir(model)`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass

from torch import nn

from odc.settings import Settings

_entries: weakref.WeakKeyDictionary[nn.Module, Sharded] = weakref.WeakKeyDictionary()
_calls: Counter[tuple[int, ...]] = Counter()


@dataclass(frozen=True)
class Sharded:
    """One call of `fully_shard`.

    Args:
        sequence: how many calls there were before on a mesh of these ranks; the same on all of them.
        rank: own global rank.
        settings: as given, None to take the root's.
    """

    sequence: int
    rank: int
    settings: Settings | None

    @staticmethod
    def modules() -> list[nn.Module]:
        """Every module that was sharded and still lives."""
        return list(_entries)


def register(modules: list[nn.Module], ranks: tuple[int, ...], rank: int, settings: Settings | None) -> None:
    """Note a call of `fully_shard` on `modules` over a mesh of `ranks`."""
    entry = Sharded(_calls[ranks], rank, settings)
    _calls[ranks] += 1
    for module in modules:
        _entries[module] = entry


def registered(module: object) -> Sharded:
    """The call that sharded `module`."""
    return _entries[module]  # type: ignore[index]


def forget_calls() -> None:
    """Count calls from 0 again, in a process that leaves one job and joins another: all ranks of that begin at 0."""
    _calls.clear()
