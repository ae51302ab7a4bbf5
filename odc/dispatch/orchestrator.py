"""The global orchestrator (OrchMLLM, section 6): what a multimodal training step calls.

    plan = orchestrator.plan(records)                            # `PlannedLoader` does it ahead
    images = orchestrator.to_encoder(plan, "vision", {"pixels": pixels})
    encoded = orchestrator.to_llm(plan, "vision", vision(images["pixels"]))
    text = orchestrator.text(plan, {"ids": ids, "labels": labels})
    tokens = orchestrator.assemble(plan, embed(text["ids"]), {"vision": encoded})

The loop stays the user's, so any encoder, connector and LLM fit. Backward of `to_llm` must run on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from odc.dispatch.exchange import BACK, Exchange, move
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
    """A step's plan and one rank's part of it.

    Args:
        step: number, the same on all ranks.
        whole: the plan of all ranks.
        me: this instance.
        inbound: by encoder: route of one row a token of the raw data; `Orchestrator.to_encoder` makes others.
        outbound: by encoder: route of the encoder's output.
        text: route of text tokens.
        interleaving: int64 [tokens here] see `StepPlan.interleaving`.
        planning_s: seconds that gathering and planning took.
    """

    step: int
    whole: StepPlan
    me: int
    inbound: dict[str, Route]
    outbound: dict[str, Route]
    text: Route
    interleaving: Ints
    planning_s: float

    @property
    def lengths(self) -> Ints:
        """Interleaved lengths of the examples here, in order."""
        return self.whole.lengths_at(self.me)

    def encoder_lengths(self, name: str) -> Ints:
        """Lengths of the subsequences to encode here, in order."""
        return self.whole.encoders[name].lengths_at(self.me)

    def encoder_tokens(self, name: str) -> Ints:
        """Tokens for the LLM that each of them has to become."""
        return self.whole.encoders[name].tokens_at(self.me)


class Orchestrator:
    """Plans steps and moves their data; one a rank. `plan` may run on a thread of its own.

    Args:
        encoders: phases, in the order in which records number them; the same on every rank.
        llm: the LLM phase.
        exchange: between the instances.
        nodes: how instances lie on nodes, so that little is moved between nodes; None ignores nodes.
    """

    def __init__(
        self,
        encoders: Sequence[Phase],
        llm: Phase,
        exchange: Exchange,
        *,
        nodes: Nodes | None = None,
    ) -> None:
        self.encoders, self.llm, self.exchange = tuple(encoders), llm, exchange
        self._nodes = nodes
        self._step = 0

    def plan(self, records: Records) -> OwnPlan:
        """Gather the records of all ranks and plan the next step; waits for all ranks to have drawn theirs.

        Raises:
            PlanError: records that no plan may hold, or a rank that planned otherwise; on every rank, naming the rank.
            WaitTimeoutError, PeerLostError: a rank, which is named, did not come.
        """
        began = perf_counter()
        self._step += 1
        gathered = self.exchange.gather(self._step, RECORDS, self._told(records))
        everyone = [self._understood(instance, told) for instance, told in enumerate(gathered)]
        try:
            whole = plan_step(everyone, self.encoders, self.llm, nodes=self._nodes)
        except PlanError as error:
            raise PlanError(
                f"step {self._step} is refused: {error}; instances are ranks {self.exchange.ranks}"
            ) from error
        self._agree(whole)
        own = self._own(whole)
        return OwnPlan(**{**own.__dict__, "planning_s": perf_counter() - began})

    def refuse(self, reason: str) -> None:
        """Have every rank's next `plan` raise PlanError with this reason; for a rank that has no data to plan."""
        self._step += 1
        self.exchange.gather(self._step, RECORDS, _refusal(reason))

    def _told(self, records: Records) -> Ints:
        """What this rank gathers: its records, or why they are bad, so that all ranks refuse the step alike."""
        try:
            caps = [self.llm.longest, *(encoder.longest for encoder in self.encoders)]
            return records.check(self.exchange.me, caps).to_array()
        except PlanError as error:
            return _refusal(str(error))

    def _understood(self, instance: int, told: Ints) -> Records:
        if len(told) and told[0] < 0:
            why = told[1:].astype(np.uint8).tobytes().decode("utf-8", "replace")
            rank = self.exchange.ranks[instance]
            raise PlanError(f"step {self._step} is refused: rank {rank} brings bad records: {why}", culprit=rank)
        return Records.from_array(told)

    def _agree(self, whole: StepPlan) -> None:
        """Raise PlanError on every rank unless all have the same phases and have made the same plan."""
        said = repr((self.encoders, self.llm, self._nodes)) + whole.digest
        mark = np.frombuffer(hashlib.sha256(said.encode()).digest()[:8], np.int64)
        marks = [int(found[0]) for found in self.exchange.gather(self._step, PLAN, mark)]
        common = max(set(marks), key=lambda one: (marks.count(one), -marks.index(one)))
        odd = [rank for rank, one in zip(self.exchange.ranks, marks, strict=True) if one != common]
        if odd:
            raise PlanError(
                f"step {self._step} is refused: rank {', '.join(map(str, odd))} made another plan from the same "
                "records, or plans for other phases; phases, policies and versions of odc must agree",
                culprit=odd[0],
            )

    def _own(self, whole: StepPlan) -> OwnPlan:
        me = self.exchange.me
        inbound = {name: Route.of(e.inbound, {"rows": e.lengths}, me) for name, e in whole.encoders.items()}
        outbound = {
            name: Route.of(e.outbound, {"rows": e.inbound.take(e.tokens)}, me) for name, e in whole.encoders.items()
        }
        text = Route.of(whole.llm, {"rows": whole.text}, me)
        return OwnPlan(self._step, whole, me, inbound, outbound, text, whole.interleaving(me), 0.0)

    def to_encoder(
        self,
        plan: OwnPlan,
        name: str,
        fields: Mapping[str, torch.Tensor],
        rows: Mapping[str, Ints] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Move raw data of one modality to where it is encoded; no gradient.

        Args:
            plan: of this step.
            name: of the encoder.
            fields: by name [rows, features...]: what this rank drew, subsequence after subsequence.
            rows: by field, where it is not one row a token: int64 [subsequences of ALL ranks] rows of each, by flat
                source place; `np.ones_like(plan.whole.encoders[name].lengths)` for one row a subsequence.

        Returns the same fields of the subsequences to be encoded here, in order. Waits as `Exchange.move`.
        """
        whole = plan.whole.encoders[name]
        listed = rows or {}
        if any(field in listed for field in fields):
            route = Route.of(whole.inbound, {field: listed.get(field, whole.lengths) for field in fields}, plan.me)
        else:
            route = _named(plan.inbound[name], fields)
        return self.exchange.move(plan.step, f"{name}.in", route, fields)

    def to_llm(self, plan: OwnPlan, name: str, encoded: torch.Tensor) -> torch.Tensor:
        """Move encoded rows straight to the LLM's instances, Pi_M o Pi_Ek^-1; differentiable, backward on every rank.

        Args:
            plan: of this step.
            name: of the encoder.
            encoded: [tokens encoded here, features], subsequence after subsequence, as many rows each as its tokens.

        Returns [tokens for the examples here, features], as `assemble` takes them.
        """
        route = _named(plan.outbound[name], {"rows": encoded})
        return move(self.exchange, plan.step, f"{name}.out", route, {"rows": encoded})["rows"]

    def text(self, plan: OwnPlan, fields: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Move text fields (token ids, labels), [text tokens drawn here, ...], straight to the LLM; no gradient."""
        return self.exchange.move(plan.step, TEXT_CHANNEL, _named(plan.text, fields), fields)

    def assemble(self, plan: OwnPlan, text: torch.Tensor, encoded: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Interleave text and encoded rows to the packed sequences here, [sum of lengths, features].

        Differentiable; `plan.lengths` are the sequences' lengths. No communication.
        """
        rows = torch.cat([text, *(encoded[encoder.name] for encoder in self.encoders)])
        return rows.index_select(0, torch.from_numpy(plan.interleaving).to(rows.device))

    def assemble_text(self, plan: OwnPlan, values: torch.Tensor, fill: float) -> torch.Tensor:
        """A text field alone (labels) in the packed sequences, with `fill` where other modalities stand."""
        place = torch.from_numpy(plan.interleaving).to(values.device)
        whole = torch.full((len(place), *values.shape[1:]), fill, dtype=values.dtype, device=values.device)
        is_text = place < values.shape[0]
        whole[is_text] = values.index_select(0, place[is_text])
        return whole


def _refusal(reason: str) -> Ints:
    return np.concatenate([[-1], np.frombuffer(reason.encode(), np.uint8).astype(np.int64)])


def _named(route: Route, fields: Mapping[str, torch.Tensor]) -> Route:
    """The route of one field for each of several that have the same rows."""
    one = route.fields["rows"]
    mark = hashlib.sha256(repr(sorted(fields)).encode() + route.digest).digest()
    return Route(route.me, dict.fromkeys(fields, one), mark)
