"""Collectives with a deadline that name the missing ranks, and a head by which all ranks refuse a step together.

Each rank counts its collectives in the job's store, so that a timeout can name the ranks that did not come.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from odc.deadlines import STORE_ENDING_S, STORE_LEAST_S
from odc.dispatch.rearrangement import Ints
from odc.errors import OdcError, PlanError, WaitTimeoutError
from odc.net import JobStore
from odc.runtime import refuse_losses

T = TypeVar("T")


class CheckedGroup:
    """A process group of all ranks that counts its collectives, used by one thread at a time. All ranks make it
    together.

    The name is the same on every rank and unlike that of any other group. `timeout_s` holds for every collective, and
    for the store's answers (5 s at least): every method raises as a JobStore does.
    """

    def __init__(self, store: Any, name: str, backend: str, timeout_s: float) -> None:
        self._name, self._timeout_s, self._number = name, timeout_s, 0
        self.rank, self.ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
        doing = f"rank {self.rank}, asking the job's store in an exchange by collectives"
        watch = functools.partial(refuse_losses, doing)
        self._store = JobStore(store, max(timeout_s, STORE_LEAST_S), self.rank, watch=watch)
        self.group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend=backend)

    def run(self, what: str, collective: Callable[[], T]) -> T:
        """Call a collective of this group; `what` it does, for messages.

        Raises WaitTimeoutError if it failed or ran late, naming the ranks that have not come to it.
        """
        self._number += 1
        self._store.set(self._key(self.rank), str(self._number))
        try:
            return collective()
        except OdcError:
            raise
        except RuntimeError as error:
            late, missing = self._missing()
            raise WaitTimeoutError(
                f"rank {self.rank}, {what}: {missing} within {self._timeout_s:g} s, or the connection broke "
                f"({str(error).splitlines()[0][:200]})",
                culprit=late[0] if late else None,
            ) from error

    def agree(self, what: str, refusal: str, *values: int) -> None:
        """Raise PlanError on every rank unless none has a refusal and all bring the same values, 63 bits each.

        `refusal` is why this rank cannot go on, or empty.
        """
        head = torch.tensor([int(bool(refusal)), *values], dtype=torch.int64, device="cpu")
        if refusal:
            self._store.set(f"{self._key(self.rank)}/refusal", refusal)
        brought = [tuple(values.tolist()) for values in self._gathered(what, head)]
        refused = [rank for rank, (flag, *_) in enumerate(brought) if flag]
        if refused:
            why = [self._store.get(f"{self._key(rank)}/refusal").decode() for rank in refused]
            raise PlanError(f"rank {self.rank}, {what}: the step is refused: {'; '.join(why)}", culprit=refused[0])
        require_same_plan(brought, self.ranks, self.rank, what)

    def gather(self, what: str, values: Ints) -> list[Ints]:
        """The int64 arrays [any length] of all ranks."""
        counts = [int(size) for size in self._gathered(what, torch.tensor([len(values)], device="cpu"))]
        own = torch.zeros(max(counts), dtype=torch.int64, device="cpu")
        own[: len(values)] = torch.from_numpy(np.array(values, np.int64))
        return [found.numpy()[:count] for found, count in zip(self._gathered(what, own), counts, strict=True)]

    def _gathered(self, what: str, mine: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, alike in shape and dtype."""
        found = [torch.empty_like(mine) for _ in self.ranks]
        self.run(what, lambda: dist.all_gather(found, mine, group=self.group))
        return found

    def close(self) -> None:
        """Give the group back; idempotent."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _missing(self) -> tuple[list[int], str]:
        """The ranks that are known not to have come to the collective, and what is known of them for a message."""
        store, late = self._store.within(STORE_ENDING_S), list[int]()
        try:
            for rank in self.ranks:
                if int(store.find(self._key(rank)) or 0) < self._number:
                    late.append(rank)
        except OdcError:  # the store went with its host, or does not answer
            if not late:
                return [], "some rank, which the job's store does not name, did not come"
        return late, f"rank {', '.join(map(str, late))} did not come" if late else "every rank came"

    def _key(self, rank: int) -> str:
        return f"odc/group/{self._name}/{rank}"


def require_same_plan(brought: list[tuple[int, ...]], ranks: tuple[int, ...], me: int, what: str) -> None:
    """Raise PlanError, naming the ranks, unless all instances bring the same values."""
    common, _ = Counter(brought).most_common(1)[0]
    odd = [ranks[i] for i, one in enumerate(brought) if one != common]
    if odd:
        others = [ranks[i] for i, one in enumerate(brought) if one == common]
        raise PlanError(
            f"rank {ranks[me]}, {what}: the step is refused: rank {', '.join(map(str, odd))} planned another "
            f"exchange than rank {', '.join(map(str, others))}; lengths, policies, dtypes and features must agree",
            culprit=odd[0],
        )
