"""One rank of a multimodal job, and its step: exchange, encode, exchange, train the language model, and back.

The graph is cut between the phases, and features and their gradients are moved by hand. Under FSDP2 a rank without
items runs the smallest dummy, because every rank must run every module that any rank runs; under odc it runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from odc.arms import arm_named
from odc.dispatch import Nodes
from odc.dispatch.exchange import BACK
from odc.dispatch.loader import PlannedLoader
from odc.dispatch.orchestrator import TEXT_CHANNEL, Orchestrator, OwnPlan
from odc.dispatch.route import Route
from odc.experiments.arms import shard_model
from odc.experiments.data.dataset import MinibatchSampler
from odc.experiments.multimodal.config import MultimodalConfig
from odc.experiments.multimodal.examples import MODALITIES, PHASES, Media, Modality, Phase, read_examples
from odc.experiments.multimodal.exchange import Mover, PhaseCount, arena_bytes, make_exchange
from odc.experiments.multimodal.inputs import Loaded, encode, labels_of, loaded_minibatches, padded_dummy, rows
from odc.experiments.multimodal.model import build_towers, load_config
from odc.experiments.multimodal.plan import Planning, phase_costs, records, useful_flops
from odc.experiments.results import JobResult, StepRecord
from odc.experiments.text.loss import loss_scale
from odc.experiments.update import adamw, agree, set_rate, update
from odc.experiments.workload import Trainer
from odc.fsdp import minibatch
from odc.trace import OPTIMIZER, recorder

NS = 1e-9
#: What a rank does in a step, in order; a pass's index is the `microbatch` of its spans. The language model's forward
#: and backward are one pass; each encoder's backward is a pass of its own.
PASSES: Final[tuple[Phase, ...]] = ("image", "audio", "llm", "audio", "image")
# The least budget of the planner's exchanges. Among the few ranks of one host there are few exchanges to try; the
# planner's default held the interpreter for 0.8 s of every step at 2 ranks, which the training thread lost.
_PLACING_S = 1e-5


@dataclass(frozen=True)
class MultimodalStep(StepRecord):
    """One optimizer step; tokens are the language model's positions, `flops` the minibatch's `useful_flops`.

    `plan_s` is the time of planning in the loader's thread, `waited_s` the time that this rank waited for its loader.
    """

    flops: float
    plan_s: float
    waited_s: float
    phases: dict[Phase, PhaseCount]


@dataclass(frozen=True)
class MultimodalResult(JobResult[MultimodalStep]):
    """Also with the most bytes that buffers for exchanging examples took at once; on demand, the declared arena."""

    exchange_bytes: int = 0


class MultimodalTrainer(Trainer):
    """One rank of a multimodal job."""

    def __init__(self, config: MultimodalConfig) -> None:
        self.config, self.job, self.rank = config, config.job, dist.get_rank()
        job, self.parts = config.job, load_config(config.job.model)
        self.geometry, self.costs = self.parts.geometry, phase_costs(self.parts)
        self.examples = read_examples(Path(job.data), self.geometry, max_tokens=job.max_tokens)
        self.sampler = MinibatchSampler(len(self.examples), job.minibatch_size, job.seed)
        self.drawn = self.sampler.state_dict()  # the sampler after the last step: the loader draws ahead
        self.exchange = make_exchange(config, arena_bytes(self.examples, job.minibatch_size, self.geometry))
        self.per_node = config.per_node or self.exchange.per_host
        self.mover = Mover(self.exchange, self.per_node)
        self.counts: dict[Phase, PhaseCount] = {}
        self._waited_s, self._on_demand = 0.0, arm_named(self.job.arm).on_demand

    def build(self) -> None:
        self.towers = nn.ModuleDict(build_towers(self.parts, self.job.seed))
        for tower in self.towers.values():
            shard_model(arm_named(self.job.arm), tower, tower.blocks, self.job.settings())  # type: ignore[arg-type]
        self.model, self.optimizer = self.towers, adamw(self.towers.parameters(), self.job)

    def state(self) -> dict[str, Any]:
        return {"sampler": self.drawn}

    def restore(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])

    def start(self, first: int) -> None:
        planning = Planning(self.config.balance, self.costs, self.geometry)
        nodes = Nodes(self.per_node, budget_s=_PLACING_S)
        ranks, left = dist.get_world_size(), self.job.steps - first
        batches = loaded_minibatches(self.examples, self.geometry, self.sampler, planning, self.rank, ranks, left)
        orchestrator = Orchestrator(*planning.phases(), self.exchange, nodes=nodes)
        self.loader = PlannedLoader(batches, lambda batch: records(batch.minibatch.drawn[self.rank]), orchestrator)
        self._planned: Iterator[tuple[Loaded, OwnPlan]] = iter(self.loader)

    def finish(self) -> None:
        self.loader.close()
        self.exchange.close()

    def result(self, measured: JobResult[Any]) -> MultimodalResult:
        return MultimodalResult(**vars(measured), exchange_bytes=self.exchange.buffer_bytes)

    def step(self, number: int, between: Callable[[], None] | None = None) -> MultimodalStep:
        loaded, plan = next(self._planned)
        waited, self._waited_s = self.loader.overlap.waited_s - self._waited_s, self.loader.overlap.waited_s
        self.drawn = loaded.sampler
        start = recorder().now()
        batch, name = loaded.minibatch, f"step {number + 1}"
        set_rate(self.optimizer, self.job, number)
        self.counts = {phase: PhaseCount() for phase in PHASES}
        self.mover.begin(plan.step, self.counts)
        with recorder().window(number + 1), self._minibatch():
            loss_sum = self._passes(loaded, plan, loss_scale(dist.get_world_size(), batch.label_tokens))
        total, _ = agree(name, loss_sum)
        with recorder().span(OPTIMIZER):
            norm = update(name, self.towers.parameters(), self.optimizer, self.job.clip)
        return MultimodalStep(
            step=number + 1,
            loss=total / max(1, batch.label_tokens),
            norm=norm,
            samples=len(batch.examples),
            tokens=batch.tokens,
            label_tokens=batch.label_tokens,
            flops=useful_flops(batch, self.costs),
            step_s=(recorder().now() - start) * NS,
            plan_s=plan.planning_s,
            waited_s=waited,
            phases=self.counts,
        )

    def _minibatch(self) -> AbstractContextManager[None]:
        return minibatch(*self.towers.values()) if self._on_demand else nullcontext()  # type: ignore[arg-type]

    def _passes(self, loaded: Loaded, plan: OwnPlan, scale: float) -> float:
        """All of `PASSES`; leaves gradients to be collected and returns this rank's summed loss."""
        media = {modality: loaded.minibatch.media(modality) for modality in MODALITIES}
        used = [modality for modality in MODALITIES if media[modality]]  # by any rank; the others rest everywhere
        outputs: dict[Modality, Tensor] = {}
        arrived: dict[Modality, Tensor] = {}
        move = self.mover.move
        for modality in used:
            where = plan.whole.encoders[modality].inbound
            route = Route.of(where, {"rows": [rows(item) for item in media[modality]]}, plan.me)
            inputs = move(modality, f"{modality}.in", where, route, loaded.inputs[modality])
            mine = [media[modality][item] for item in where.arriving(plan.me)]
            outputs[modality] = self._encode(modality, inputs, mine)
        for modality in used:
            where, route = plan.whole.encoders[modality].outbound, plan.outbound[modality]
            features = move(modality, f"{modality}.out", where, route, outputs[modality].detach())
            arrived[modality] = features.requires_grad_()
        texts = move("llm", TEXT_CHANNEL, plan.whole.llm, plan.text, loaded.texts)
        loss = self._language(plan, texts, arrived, scale)
        for modality in reversed(used):
            where, route = plan.whole.encoders[modality].outbound.inverse(), plan.outbound[modality].inverse
            features = arrived[modality]
            gradient = torch.zeros_like(features) if features.grad is None else features.grad
            gradient = move(modality, f"{modality}.out{BACK}", where, route, gradient)
            self._encode_back(modality, outputs[modality], gradient)
        return loss

    def _encode(self, modality: Modality, inputs: Tensor, mine: Sequence[Media]) -> Tensor:
        """This rank's features [rows, width], none if it has no items. Under FSDP2 it may have to run a dummy."""
        if not mine and self._on_demand:
            return torch.zeros(0, self.geometry.width)
        count = self.counts[modality]
        if mine:
            count.items, count.real = len(mine), sum(item.encoded for item in mine)
            padded = max(item.encoded for item in mine) * len(mine) if modality == "audio" else count.real
            count.computed = padded
            with recorder().microbatch(PASSES.index(modality)):
                return encode(self.towers[modality], inputs, mine)
        inputs, dummies = padded_dummy(modality, self.geometry)
        count.computed = dummies[0].encoded
        with recorder().microbatch(PASSES.index(modality)):
            # No row of it is a feature of an item, but its graph is whole: backward runs through every module.
            return encode(self.towers[modality], inputs, dummies)[:0]

    def _encode_back(self, modality: Modality, output: Tensor, gradient: Tensor) -> None:
        if output.grad_fn is None:
            return
        with recorder().microbatch(len(PASSES) - 1 - PASSES.index(modality)):
            output.backward(gradient)

    def _language(self, plan: OwnPlan, texts: Tensor, arrived: Mapping[Modality, Tensor], scale: float) -> float:
        """Forward and backward of the sequences that this rank was dealt; returns their summed loss."""
        count, lengths = self.counts["llm"], plan.lengths.tolist()
        if not lengths and self._on_demand:
            return 0.0
        order = torch.from_numpy(plan.interleaving)
        count.items, count.real = len(lengths), len(order)
        if not lengths:  # a sequence of one position, without a target
            lengths, order, texts = [1], torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32)
        count.computed = len(order)
        features = torch.cat([torch.zeros(0, self.geometry.width), *arrived.values()])
        with recorder().microbatch(PASSES.index("llm")):
            labels = labels_of(texts, order, lengths)
            loss = self.towers["llm"](texts[:, 0].long(), features, order, labels, lengths)
            (loss * scale).backward()
        return float(loss.detach())
