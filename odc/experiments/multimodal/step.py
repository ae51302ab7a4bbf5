"""One optimizer step of a multimodal model: exchange, encode, exchange, train the language model, and back.

Chose to cut the graph between the phases and to move features and their gradients by hand, over one backward through
everything: every pass begins and ends at a known moment, so that what each phase cost can be measured, and a rank
without items of a modality takes no part in it, neither forward nor backward. The price: the order of passes is fixed.

Under FSDP2 every rank must run every module that any rank runs, or the ranks hang: there, a rank without items runs the
smallest dummy, with zero gradients. Under odc it runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from odc.balance import QuadraticCost
from odc.dispatch.exchange import BACK
from odc.dispatch.orchestrator import TEXT_CHANNEL, OwnPlan
from odc.dispatch.route import Route
from odc.experiments.config import JobConfig
from odc.experiments.finish import agree, update
from odc.experiments.multimodal.examples import MODALITIES, Media, Modality
from odc.experiments.multimodal.exchange import Mover
from odc.experiments.multimodal.flops import useful_flops
from odc.experiments.multimodal.loader import Loaded
from odc.experiments.multimodal.minibatch import PHASES, Phase
from odc.experiments.multimodal.model import Geometry
from odc.experiments.multimodal.passes import encode, labels_of, padded_dummy, rows
from odc.experiments.multimodal.results import MultimodalStep, PhaseCount
from odc.experiments.schedule import learning_rate
from odc.experiments.text.loss import loss_scale
from odc.trace import OPTIMIZER, recorder

NS = 1e-9
#: What a rank does in a step, in order; a pass's index is the `microbatch` of its spans. The language model's forward
#: and backward are one pass; each encoder's backward is a pass of its own.
PASSES: Final[tuple[Phase, ...]] = ("image", "audio", "llm", "audio", "image")


@dataclass
class Stepper:
    """What all steps of a job share; `run` does one. On every rank, on its training thread.

    Args:
        config: the job's; its arm, `fsdp2` or `odc`, says who communicates when.
        towers: the sharded submodules `image`, `audio` and `llm`.
        optimizer: over all their parameters.
        geometry: of the model.
        costs: useful FLOPs of each phase.
        mover: of items between ranks.
    """

    config: JobConfig
    towers: Mapping[str, Any]
    optimizer: Optimizer
    geometry: Geometry
    costs: Mapping[Phase, QuadraticCost]
    mover: Mover
    counts: dict[Phase, PhaseCount] = field(default_factory=dict)

    def run(self, step: int, loaded: Loaded, plan: OwnPlan, waited_s: float = 0.0) -> MultimodalStep:
        """Optimizer step number `step` (from 0) on a loaded and planned minibatch; meets the other ranks.

        `waited_s` is what the rank waited for it, noted in the record.

        Raises `NonFiniteLossError` on every rank, before the update, when a loss or the gradient norm is not finite.
        """
        start = recorder().now()
        config, minibatch = self.config, loaded.minibatch
        rate = learning_rate(step, steps=config.steps, peak=config.lr, warmup=config.warmup, floor=config.min_lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.counts = {phase: PhaseCount() for phase in PHASES}
        self.mover.begin(plan.step, self.counts)
        with recorder().window(step + 1), self._minibatch():
            loss_sum = self._passes(loaded, plan, loss_scale(dist.get_world_size(), minibatch.label_tokens))
        total, _ = agree(step, loss_sum, 0)
        with recorder().span(OPTIMIZER):
            parameters = [parameter for tower in self.towers.values() for parameter in tower.parameters()]
            norm = update(step, parameters, self.optimizer, config.clip)
        return MultimodalStep(
            step=step + 1,
            loss=total / max(1, minibatch.label_tokens),
            norm=norm,
            samples=len(minibatch.examples),
            tokens=minibatch.tokens,
            label_tokens=minibatch.label_tokens,
            flops=useful_flops(minibatch, self.costs),
            step_s=(recorder().now() - start) * NS,
            plan_s=plan.planning_s,
            waited_s=waited_s,
            phases=self.counts,
        )

    def _minibatch(self) -> AbstractContextManager[None]:
        if not self._on_demand:
            return nullcontext()
        from odc.fsdp import minibatch

        return minibatch(*self.towers.values())

    @property
    def _on_demand(self) -> bool:
        return self.config.arm == "odc"

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
            # No row of it is anybody's feature, but its graph is whole: backward runs through every module.
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
