"""Fine-tuning of a causal language model: a step plans, runs the microbatches, agrees on the loss and updates.

Every rank makes the same plan from the same lengths, without communication. Ranks meet for the loss once a step.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from odc.arms import ARM_NAMES, ArmName, arm_named
from odc.balance import Plan, cost_of, queue_of
from odc.blocks import blocks_of
from odc.errors import AbandonedMinibatchError
from odc.experiments.arms import run_minibatch, run_queue, shard_model
from odc.experiments.config import DEFAULT_ARMS, JobConfig
from odc.experiments.data.dataset import MinibatchSampler, load_dataset
from odc.experiments.data.documents import Document
from odc.experiments.data.packing import Microbatch, pack, padded_dummy
from odc.experiments.device import out_of_memory, settle
from odc.experiments.launch import start_server
from odc.experiments.preflight import check_arm, check_extras, model_source, preflight
from odc.experiments.progress import Progress
from odc.experiments.results import ArmRun, SkippedStep, StepRecord, totals
from odc.experiments.text.export import export
from odc.experiments.text.lora import add_adapters
from odc.experiments.text.loss import loss_scale, use_document_loss
from odc.experiments.text.model import build_model, causal_config, has_weights
from odc.experiments.text.packing_check import check_documents_once
from odc.experiments.text.pieces import DocumentPieces
from odc.experiments.text.validation import validation_loss
from odc.experiments.update import adamw, agree, set_rate, update
from odc.experiments.workload import Trainer, Workload
from odc.trace import OPTIMIZER, Stat, piece_of, recorder

NS = 1e-9


@dataclass(frozen=True)
class TextStep(StepRecord):
    """One optimizer step. The planner's cost model predicts bubbles, of the plan and of the best possible plan.

    `counts` are microbatches and pieces of split samples by rank; in all, `dummies` of them are dummies and `pieces`
    are pieces. `retried` is why the minibatch had to run again.
    """

    lr: float
    counts: list[int]
    dummies: int
    plan_bubble: float
    bound_bubble: float
    retried: str | None = None
    pieces: int = 0


@dataclass(frozen=True)
class _PlannedMinibatch:
    """This rank's microbatches of a planned minibatch, their predicted costs (none for dummies), and the loss scale."""

    documents: list[Document]
    plan: Plan
    mine: list[Microbatch]
    costs: list[float]
    scale: float


class TextTrainer(Trainer):
    """One rank of a fine-tuning job."""

    def __init__(self, config: JobConfig, progress: Progress, device: torch.device) -> None:
        self.config, self.progress, self.device, self.arm = config, progress, device, arm_named(config.arm)
        self.dataset = load_dataset(config, progress)
        self.sampler = MinibatchSampler(len(self.dataset.documents), config.minibatch_size, config.seed)
        self.pieces: DocumentPieces | None = None  # only under an arm that splits samples
        self.computed = 0  # microbatches and pieces that this rank ran in its last step

    def check(self) -> None:
        documents = [*self.dataset.lengths, *map(len, self.dataset.valid)]
        check_documents_once(causal_config(model_source(self.config.model)), max(documents))

    def build(self) -> None:
        """Builds the sharded model. Weights are drawn on the CPU, the same bits in every arm; each unit is moved to the
        device as it is sharded.

        Parameters are fp32; under "bf16" compute is in bf16 and gradients are reduced in fp32.
        """
        config, source = self.config, model_source(self.config.model)
        # A published model may have fewer ids than its tokenizer, which names tokens of images too.
        vocab = self.dataset.vocab_size if has_weights(source) else self.dataset.tokenizer.vocab_size
        model = build_model(source, vocab_size=vocab, dtype=torch.float32, seed=config.seed)
        fields, again = model.config.to_dict(), config.activation_checkpointing
        self.cost = cost_of(fields, checkpointing=again, warn=self.progress.note)
        if config.lora:
            add_adapters(model, config)
        use_document_loss(model)
        blocks = blocks_of(model)
        if config.activation_checkpointing:
            for block in blocks:  # parameter names and hooks stay as they are
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        options: dict[str, Any] = {}
        if config.precision == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options |= {"per_node": config.per_node, "optimizer_sharding": config.optimizer_sharding}
        shard_model(self.arm, model, blocks, config.settings(), self.device.type, **options)
        self.model, self.optimizer = model, adamw(model.parameters(), config)
        if self.arm.splits:
            self.pieces = DocumentPieces(model, config, max(self.dataset.lengths), self.device)

    def start(self, first: int) -> None:
        if self.pieces is not None:
            self.pieces.splitter.prepare()

    def state(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])

    def finish(self) -> None:
        if self.pieces is not None:
            self.pieces.splitter.close()
        if self.config.export is not None:
            self.progress.phase(f"exporting to {self.config.export}")
            export(Path(self.config.export), self.model, self.dataset.tokenizer, self.config)

    def validate(self, done: int) -> float | None:
        """After every `valid_every` steps and the last, if there is a validation set."""
        config, documents = self.config, self.dataset.valid
        due = done == config.steps or (config.valid_every and done % config.valid_every == 0)
        if not documents or not due:
            return None
        self.progress.phase(f"validating after step {done}")
        return validation_loss(self.model, self.arm, documents, self.cost, config, self.device)

    def step(self, number: int, between: Callable[[], None] | None = None) -> TextStep | SkippedStep:
        record = self.run(number, next(self.sampler), between)
        if isinstance(record, TextStep) and record.retried is not None:
            self.progress.note(f"step {record.step} was run again in smaller microbatches: {record.retried}")
        return record

    def run(self, step: int, samples: list[int], between: Callable[[], None] | None = None) -> TextStep | SkippedStep:
        """Optimizer step number `step` (from 0) on the documents `samples`; meets the other ranks.

        If a rank runs out of memory under an on-demand arm, all ranks run the minibatch once more, in smaller
        microbatches, and then skip it.
        """
        start = recorder().now()
        documents = [self.dataset.documents[i] for i in samples]
        rate = set_rate(self.optimizer, self.config, step)
        prepared = self._prepare(documents, self.config.max_tokens)
        with recorder().window(step + 1):
            attempt = self._attempt_twice(step, documents, prepared, between)
        if isinstance(attempt, AbandonedMinibatchError):
            return SkippedStep(step + 1, f"rank {attempt.culprit}: {attempt.reason}")
        plan, loss_sum, retried = attempt
        label_tokens = sum(document.label_tokens for document in documents)
        total, computed = agree(f"step {step + 1}", loss_sum, self.computed)
        with recorder().span(OPTIMIZER):
            norm = update(f"step {step + 1}", self.model.parameters(), self.optimizer, self.config.clip)
            settle(self.device)
        counts = [int(count) for (count,) in computed]
        pieces = sum(len(split.ranks) for split in plan.splits)
        return TextStep(
            step=step + 1,
            loss=total / max(1, label_tokens),
            norm=norm,
            lr=rate,
            samples=len(documents),
            tokens=sum(len(document) for document in documents),
            label_tokens=label_tokens,
            counts=counts,
            dummies=sum(counts) - len(queue_of(plan)) - pieces,
            step_s=(recorder().now() - start) * NS,
            plan_bubble=self.arm.predicted_bubble(plan, self.config.per_node),
            bound_bubble=plan.bubble_bound,
            retried=retried,
            pieces=pieces,
        )

    def _prepare(self, documents: list[Document], max_tokens: int) -> _PlannedMinibatch:
        rank, world = dist.get_rank(), dist.get_world_size()
        limits = (
            {"node": self.pieces.splitter.node, "floor": self.config.piece_floor} if self.pieces is not None else {}
        )
        plan = self.arm.plan([len(d) for d in documents], world, max_tokens, self.cost, self.config.seed, **limits)
        loads = self.arm.loads(plan, rank)
        mine = [pack([documents[i] for i in microbatch]) for microbatch, _ in loads]
        if not self.arm.dynamic:
            mine += [padded_dummy() for _ in range(self.arm.counts(plan)[rank] - len(mine))]
        scale = loss_scale(world, sum(document.label_tokens for document in documents))
        return _PlannedMinibatch(documents, plan, mine, [cost for _, cost in loads], scale)

    def _attempt_twice(
        self, step: int, documents: list[Document], first: _PlannedMinibatch, between: Callable[[], None] | None
    ) -> tuple[Plan, float, str | None] | AbandonedMinibatchError:
        """(plan, this rank's summed loss, why it was retried), or the second error; the same outcome on every rank."""
        try:
            return first.plan, self._minibatch(step, first, between), None
        except AbandonedMinibatchError as error:
            reason = f"rank {error.culprit}: {error.reason}"
        longest = max(len(document) for document in documents)
        least = longest if self.pieces is None else self.pieces.least_cap(longest)
        smaller = self._prepare(documents, max(self.config.max_tokens // 2, least))
        try:
            return smaller.plan, self._minibatch(step, smaller, between), reason
        except AbandonedMinibatchError as error:
            return error.with_traceback(None)  # frames would keep the activations of the failed microbatch

    def _minibatch(self, step: int, prepared: _PlannedMinibatch, between: Callable[[], None] | None) -> float:
        """Runs this rank's pieces and microbatches, or under a dynamic arm what it claims; returns its loss."""
        mine = prepared.mine
        losses: list[float] = []
        given_up = False

        def run(inputs: dict[str, Any], unit: str = "") -> None:
            nonlocal given_up
            if given_up:
                return
            if len(losses) == 1 and between is not None:
                between()
            try:
                with recorder().microbatch(len(losses), unit):
                    began = time.thread_time()
                    loss = self.model(**inputs)
                    (loss * prepared.scale).backward()
                    losses.append(float(loss.detach()))  # on CUDA after backward: the stream is waited for
                    self._slow_down(time.thread_time() - began)
            except (RuntimeError, MemoryError) as error:
                if not self.arm.on_demand or not out_of_memory(error):
                    raise
                given_up = True
                what = unit or "a microbatch"
                self.model.abandon_minibatch(f"out of memory in {what} of {inputs['input_ids'].shape[1]} tokens")

        def pieces() -> None:
            assert self.pieces is not None
            for piece, inputs in self.pieces.of(prepared.plan, prepared.documents):
                run(inputs, piece_of(piece.sample))

        def backward(microbatch: Microbatch) -> None:
            run(microbatch.to(self.device).model_inputs())

        def claimed(number: int, tensors: Mapping[str, torch.Tensor]) -> None:
            # What is drawn at random (dropout) belongs to the microbatch, not to the rank that happens to compute it.
            torch.manual_seed(int(np.random.SeedSequence([self.config.seed, step, number]).generate_state(1)[0]))
            backward(Microbatch.from_tensors(tensors))

        if self.arm.dynamic:
            run_queue(self.model, [microbatch.tensors() for microbatch in mine], prepared.costs, claimed)
        else:
            run_minibatch(
                self.arm, self.model, len(mine), lambda m: backward(mine[m]), pieces if self.arm.splits else None
            )
        self.computed = len(losses)
        return math.fsum(losses)

    def _slow_down(self, computed_s: float) -> None:
        """Emulates a slower device: sleeps for the rest of what `computed_s` seconds of processor time take on it."""
        factor = self.config.slowed().get(dist.get_rank(), 1.0)
        if factor > 1:
            time.sleep((factor - 1) * computed_s)


class TextWorkload(Workload[JobConfig]):
    """A job of `odc train` or `odc compare`."""

    schema = "odc-compare-1"
    arms = ARM_NAMES
    default_arms = DEFAULT_ARMS

    def __init__(self, config: JobConfig) -> None:
        super().__init__(config, config, config.label or "odc train", config.output)
        self.device = config.device
        self.keeps |= config.export is not None
        self.restarts, self.keep = config.recover, config.keep
        if config.fewest:
            self.fewest, self.rejoin_s = config.fewest, config.rejoin_s

    def check_arm(self) -> None:
        check_arm(self.config, self.config.arm)

    def check_extras(self) -> None:
        check_extras(self.config)

    def check(self) -> None:
        preflight(self.config)

    def prepare(self, title: str = "") -> None:
        """Also puts token ids into the cache, where ranks find them."""
        self.check()
        start_server()  # loads while the data is read
        progress = Progress(self.config.steps, title or self.title)
        try:
            dataset = load_dataset(self.config, progress)
            job, count = self.config, len(dataset.documents)
            epochs = job.steps * job.minibatch_size / count
            unseen = f", {len(dataset.valid)} for validation" if dataset.valid else ""
            progress.phase(
                f"{count} documents{unseen}, {sum(dataset.lengths):,} tokens; {job.steps} steps of "
                f"{job.minibatch_size} are {epochs:.2g} epochs; starting the ranks"
            )
        finally:
            progress.close()

    def trainer(self, progress: Progress, device: torch.device) -> TextTrainer:
        return TextTrainer(self.config, progress, device)

    def with_arm(self, arm: str, title: str = "", spans: str | None = None) -> Self:
        changes: dict[str, Any] = {"arm": cast(ArmName, arm), "label": title, "output": None, "spans": spans}
        return type(self)(self.config.with_(**changes))

    def to_dict(self) -> dict[str, Any]:
        return self.config.to_dict()

    def figures(self, runs: Sequence[ArmRun], skip: int, seconds: Sequence[float]) -> dict[str, Any]:
        steps = runs[0].results[0].steps[skip:]
        return {
            "samples_per_s": Stat.of(s.samples / t for s, t in zip(steps, seconds, strict=True)).to_dict(),
            "tokens_per_s": Stat.of(s.tokens / t for s, t in zip(steps, seconds, strict=True)).to_dict(),
            "total": totals(steps, sum(seconds)),
            "plan": {
                "bubble": fmean(step.plan_bubble for step in steps),
                "bound": fmean(step.bound_bubble for step in steps),
                "microbatches": [step.counts for step in steps],
                "dummies": sum(step.dummies for step in steps),
                "pieces": [step.pieces for step in steps],
            },
        }
