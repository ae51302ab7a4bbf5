"""One rank's part of a multimodal job, inside a process group that is already there.

Chose to keep a job to what a comparison needs: train and measure. There are no checkpoints.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist

from odc.arms import arm_named
from odc.dispatch import Nodes
from odc.dispatch.loader import PlannedLoader
from odc.dispatch.orchestrator import Orchestrator
from odc.experiments import footprint
from odc.experiments.arms import shard_model
from odc.experiments.data.sampling import MinibatchSampler
from odc.experiments.multimodal.config import MultimodalConfig
from odc.experiments.multimodal.examples import read_examples
from odc.experiments.multimodal.exchange import Mover, arena_bytes, make_exchange
from odc.experiments.multimodal.flops import phase_costs
from odc.experiments.multimodal.loader import loaded_minibatches
from odc.experiments.multimodal.model import build_towers, load_config
from odc.experiments.multimodal.plan import Planning, records
from odc.experiments.multimodal.results import MultimodalResult, MultimodalStep
from odc.experiments.multimodal.step import Stepper
from odc.experiments.progress import Progress
from odc.experiments.sharded import adamw
from odc.trace import recorder, save_spans

# The least that the planner's exchanges take. Among the few ranks of one host few exchanges are all there are; the
# planner's default held the interpreter for 0.8 s of every step at 2 ranks (measured), which the training thread lost.
_PLACING_S = 1e-5


class MultimodalRank:
    """Built and run on every rank, on its training thread. Building meets no other rank; running does.

    Args:
        config: the job's.
        progress: where steps are shown.
    """

    def __init__(self, config: MultimodalConfig, progress: Progress) -> None:
        self.config, self.progress, self.rank = config, progress, dist.get_rank()
        job, model = config.job, load_config(config.job.model)
        recorder().set_rank(self.rank)
        torch.manual_seed(job.seed + self.rank)
        examples = read_examples(Path(job.data), model.geometry, max_tokens=job.max_tokens)
        costs = phase_costs(model)
        sampler = MinibatchSampler(len(examples), job.minibatch_size, job.seed)
        planning = Planning(config.balance, costs, model.geometry)
        self.exchange = make_exchange(config, arena_bytes(examples, job.minibatch_size, model.geometry))
        orchestrator = Orchestrator(
            *planning.phases(), self.exchange, nodes=Nodes(config.per_node, budget_s=_PLACING_S)
        )
        batches = loaded_minibatches(
            examples, model.geometry, sampler, planning, self.rank, dist.get_world_size(), job.steps
        )
        self.loader = PlannedLoader(batches, lambda batch: records(batch.minibatch.drawn[self.rank]), orchestrator)
        progress.phase("building the model")
        footprint.trim()
        self.baseline = footprint.held_bytes()
        self.towers = build_towers(model, job.seed)
        for tower in self.towers.values():
            shard_model(arm_named(job.arm), tower, tower.blocks, job.settings())  # type: ignore[arg-type]
        parameters = [parameter for tower in self.towers.values() for parameter in tower.parameters()]
        optimizer = adamw(parameters, job)
        self.stepper = Stepper(
            job, self.towers, optimizer, model.geometry, costs, Mover(self.exchange, config.per_node)
        )

    def run(self) -> MultimodalResult:
        """All steps; stores the rank's spans where the job says."""
        done: list[MultimodalStep] = []
        recorder().clear()
        job = self.config.job
        self.progress.phase("step 1")
        waited = 0.0
        for step, (loaded, plan) in enumerate(self.loader):
            overlap = self.loader.overlap
            done.append(self.stepper.run(step, loaded, plan, overlap.waited_s - waited))
            waited = overlap.waited_s
            self.progress.step(step + 1, done[-1].loss, done[-1].tokens / done[-1].step_s, None)
            if step == 0:
                with contextlib.suppress(OSError):  # where this is not allowed, the peak is that since the start
                    footprint.reset_peak()
        peak = footprint.peak_bytes()
        if job.spans is not None:
            save_spans(Path(job.spans) / f"rank-{self.rank}.jsonl", recorder().spans())
        self.exchange.close()
        return MultimodalResult(self.rank, done, peak, self.baseline, self.exchange.buffer_bytes)
