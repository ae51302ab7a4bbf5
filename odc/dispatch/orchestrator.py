"""The global orchestrator (OrchMLLM, section 6): gathers the records of all ranks and plans a multimodal step.

The training loop moves the data by the plan's routes and `Exchange.move`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from odc.dispatch.exchange import BACK, Exchange
from odc.dispatch.rearrangement import Ints
from odc.dispatch.records import Records
from odc.dispatch.route import Route
from odc.dispatch.step import Nodes, Phase, StepPlan, plan_step
from odc.errors import PlanError

RECORDS, PLAN, TEXT_CHANNEL = "records", "plan", "text"


def channels(encoders: Sequence[str]) -> list[str]:
    """Every channel that an orchestrator of these encoders uses: what `OnDemandExchange` has to declare."""
    moves = [f"{name}.in" for name in encoders] + [f"{name}.out" for name in encoders]
    return [RECORDS, PLAN, TEXT_CHANNEL, *moves, *(f"{name}.out{BACK}" for name in encoders)]


@dataclass(frozen=True, eq=False)
class OwnPlan:
    """A step's plan and one rank's part of it."""

    step: int  # number, the same on all ranks
    whole: StepPlan  # of all ranks
    me: int  # this instance
    outbound: dict[str, Route]  # by encoder: route of the encoder's output
    text: Route  # route of text tokens
    interleaving: Ints  # int64 [tokens here] see `StepPlan.interleaving`
    planning_s: float  # seconds that gathering and planning took

    @property
    def lengths(self) -> Ints:
        """Interleaved lengths of the examples here, in order."""
        return self.whole.lengths_at(self.me)

    def encoder_lengths(self, name: str) -> Ints:
        """Lengths of the subsequences to encode here, in order."""
        return self.whole.encoders[name].lengths_at(self.me)


class Orchestrator:
    """Plans the steps of one rank with all others; `plan` may run on a thread of its own.

    `encoders` are listed in the order in which records number them, the same on every rank. `Nodes()` without a size
    are the hosts, which the exchange finds; raises as `Exchange.per_host` does.
    """

    def __init__(
        self, encoders: Sequence[Phase], llm: Phase, exchange: Exchange, *, nodes: Nodes | None = None
    ) -> None:
        if nodes is not None and not nodes.size:
            nodes = replace(nodes, size=exchange.per_host)
        self.encoders, self.llm, self.exchange, self._nodes = tuple(encoders), llm, exchange, nodes
        self._step = 0

    def plan(self, records: Records) -> OwnPlan:
        """Gather the records of all ranks and plan the next step; waits for all ranks to have drawn theirs.

        Raises:
            PlanError: records that no plan may hold, or a rank that planned otherwise; on every rank, naming the rank.
            WaitTimeoutError, PeerLostError: a rank, which is named, did not come.
        """
        began = perf_counter()
        self._step += 1
        gathered = self.exchange.gather(self._step, RECORDS, self._row_of(records))
        everyone = [self._understood(instance, values) for instance, values in enumerate(gathered)]
        try:
            whole = plan_step(everyone, self.encoders, self.llm, nodes=self._nodes)
        except PlanError as error:
            raise PlanError(
                f"step {self._step} is refused: {error}; instances are ranks {self.exchange.ranks}"
            ) from error
        self._agree(whole)
        return self._own(whole, began)

    def refuse(self, reason: str) -> None:
        """Have every rank's next `plan` raise PlanError with this reason; for a rank that has no data to plan."""
        self._step += 1
        self.exchange.gather(self._step, RECORDS, _refusal(reason))

    def _row_of(self, records: Records) -> Ints:
        """What this rank gathers: its records, or why they are bad, so that all ranks refuse the step alike."""
        try:
            caps = [self.llm.cap, *(encoder.cap for encoder in self.encoders)]
            return records.check(self.exchange.me, caps).to_array()
        except PlanError as error:
            return _refusal(str(error))

    def _understood(self, instance: int, values: Ints) -> Records:
        if len(values) and values[0] < 0:
            why = values[1:].astype(np.uint8).tobytes().decode("utf-8", "replace")
            rank = self.exchange.ranks[instance]
            raise PlanError(f"step {self._step} is refused: rank {rank} brings bad records: {why}", culprit=rank)
        return Records.from_array(values)

    def _agree(self, whole: StepPlan) -> None:
        """Raise PlanError on every rank unless all have the same phases and have made the same plan."""
        planned = repr((self.encoders, self.llm, self._nodes)) + whole.digest
        mark = np.frombuffer(hashlib.sha256(planned.encode()).digest()[:8], np.int64)
        marks = [int(found[0]) for found in self.exchange.gather(self._step, PLAN, mark)]
        common, _ = Counter(marks).most_common(1)[0]
        odd = [rank for rank, one in zip(self.exchange.ranks, marks, strict=True) if one != common]
        if odd:
            raise PlanError(
                f"step {self._step} is refused: rank {', '.join(map(str, odd))} made another plan from the same "
                "records, or plans for other phases; phases, policies and versions of odc must agree",
                culprit=odd[0],
            )

    def _own(self, whole: StepPlan, began: float) -> OwnPlan:
        me = self.exchange.me
        outbound = {
            name: Route.of(e.outbound, {"rows": e.inbound.take(e.tokens)}, me) for name, e in whole.encoders.items()
        }
        text = Route.of(whole.llm, {"rows": whole.text}, me)
        rows = whole.interleaving(me)
        return OwnPlan(self._step, whole, me, outbound, text, rows, perf_counter() - began)


def _refusal(reason: str) -> Ints:
    return np.concatenate([[-1], np.frombuffer(reason.encode("utf-8", "replace"), np.uint8).astype(np.int64)])
