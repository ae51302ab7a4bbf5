"""Actions of one process timed in turns, so that a machine with other work slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from odc.bench.ranks import held
from odc.bench.units import sharded_by
from odc.settings import Settings

OWNER = 1  # the rank to which rank 0 pushes


def in_turns(
    actions: Mapping[str, Callable[[], object]],
    rounds: int,
    after: Callable[[], object] = lambda: None,
    warm: int = 2,
) -> dict[str, list[float]]:
    """Seconds of each action by round; `after` follows each of them untimed."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(warm + rounds):
        for name, action in actions.items():
            began = time.perf_counter()
            made = action()
            times[name].append(time.perf_counter() - began)
            del made  # what it made is freed untimed
            after()
    return {name: taken[warm:] for name, taken in times.items()}


def build_all(chunk: int, ways: dict[str, Settings]) -> None:
    """One unit of two chunks of `chunk` bytes of fp32 for each way, with open minibatches. Every rank calls it."""
    held.modules = {name: sharded_by("odc", 2 * chunk, torch.float32, "block", way) for name, way in ways.items()}
    for module in held.modules.values():
        module.unshard()
        module.reshard()


class Push:
    """Pushes gradients of ones to the owner, and returns once it has added them."""

    def __init__(self, way: str, dtype: torch.dtype) -> None:
        from odc.fsdp import root_of
        from odc.protocol import Gradient, HostRoute

        root = root_of(held.modules[way])
        self.member, self.layout, self.unit = root.member, root.layout, root.layout.units[0]
        assert isinstance(root.member.pusher.route, HostRoute)
        self._route = root.member.pusher.route
        self.gradients = [
            Gradient(i, torch.ones(2 * spec.numel, dtype=dtype)) for i, spec in enumerate(self.unit.params)
        ]

    def __call__(self) -> None:
        self._route.push_to(OWNER, self.unit, self.gradients)
        ring = self.member.protocol.ring(OWNER, 0)
        while ring.added() != ring.posted():
            time.sleep(0)
