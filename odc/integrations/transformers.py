"""Hugging Face's Trainer on `odc.fully_shard`: `OdcTrainer` in place of `Trainer`, and nothing else changes.

The model is sharded here and marked as prepared, so that accelerate uses it as it is; ranks meet once for each
optimizer step. `odc.integrations.transformers_arguments` lists which of a Trainer's arguments are applied.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from odc.balance import longest_piece
from odc.blocks import blocks_of
from odc.errors import ConfigError, install, refuse_setting
from odc.fsdp import OdcModule, fully_shard
from odc.integrations._generation import generate_alone, generates
from odc.integrations.transformers_arguments import (
    AcceleratorOptions,
    keep_labels,
    refuse_arguments,
    settings_for,
)
from odc.integrations.transformers_balance import (
    PlannedMicrobatch,
    PlannedSteps,
    StepOfRank,
    cost_of_model,
    lengths_of,
    local_metrics,
    planned_loader,
)
from odc.integrations.transformers_checkpoints import (
    WHOLE,
    adapter_weights,
    load_optimizer,
    load_weights,
    reads,
    saved_weights,
    without_stock_loading,
)
from odc.integrations.transformers_loss import RouterLoss, ScaledLoss, refuse_unplanned, wants_router_loss
from odc.integrations.transformers_pieces import arguments_of, refuse_documents, refuse_unsplittable, row_of
from odc.integrations.transformers_recovery import RecoveringTrainer, alone, refuse_unrepeatable
from odc.integrations.transformers_rows import refuse_mixed_rows
from odc.integrations.transformers_vllm import serve_from_shards, serves, without_communicator
from odc.recovery import Recovery
from odc.settings import Settings
from odc.split import Splitter, ranks_of_host
from odc.split.cut import NO_LABEL

try:
    import accelerate  # noqa: F401  (a Trainer needs it)
    from transformers import PreTrainedModel, TrainingArguments
except ImportError as error:
    raise ImportError(f"OdcTrainer needs transformers and accelerate: {install('transformers')}") from error

_FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
_PART = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


def prepare(model: Any, *, blocks: str | Iterable[str] | None = None, **options: Any) -> Any:
    """Shard a Hugging Face model in place so that accelerate takes it as it is; for a loop of your own.

    Call it on every rank after `Accelerator(...)`, whose `mixed_precision="bf16"` and `dynamo_backend` it applies, and
    before the optimizer is made and `accelerator.prepare(model, optimizer, ...)` is called. `model` is a
    `PreTrainedModel` or a `PeftModel`, with the same weights on every rank. Each block becomes a unit; embedding and
    head stay in the root, because some libraries read their weights outside of their forward, and so does a block that
    shares a parameter with the rest. `blocks` are class names of the blocks, if the model does not name them
    (`_no_split_modules`); `options` go to `fully_shard` for every unit, and a `mp_policy` among them replaces the
    Accelerator's, a `mesh` the world on its device. Each unit moves there as it is sharded, so a model that fits no
    device may be made on the CPU. Save it by torch's `get_model_state_dict`: accelerate takes it for a model that is
    whole on each rank, and would save one rank's shards. Raises ConfigError if the Accelerator asks for something odc
    cannot do, or (at the first forward) was made after this call.
    """
    _refuse_unready(model)
    wanted = AcceleratorOptions.current()
    options["mesh"] = options.get("mesh") or wanted.mesh()
    own = options.pop("mp_policy", None)
    if own is not None and wanted.precision == "bf16" and own.param_dtype is not torch.bfloat16:
        raise ConfigError(f"the Accelerator says mixed_precision='bf16' and mp_policy says {own.param_dtype}")
    made: Any = type(model)
    for block in blocks_of(model, blocks):
        wanted.compile(block)
        fully_shard(block, mp_policy=own or wanted.policy(root=False), **options)
    fully_shard(model, mp_policy=own or wanted.policy(root=True), **options)
    keep_labels(model)
    if any(parameter.requires_grad for parameter in model.parameters()):
        model.register_forward_hook(_reshard)
    model._is_accelerate_prepared = True  # accelerate's own mark: do not wrap it in DDP
    model.no_sync = lambda: _no_sync(model)  # `accelerator.no_sync(model)` calls it
    # By these a Trainer finds how labels are shifted, and save_pretrained the code of a model that has its own.
    for attribute in ("__name__", "__qualname__", "__module__"):
        setattr(type(model), attribute, getattr(made, attribute))
    generate_alone(model)
    if not AcceleratorOptions.known():
        _refuse_late_accelerator(model)
    return model


@contextlib.contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _reshard(model: Any, *unused: Any) -> None:
    """After a forward without gradients, as of an evaluation: the root's parameters are shards again.

    torch leaves those of a root whole until the next backward, which may never come. An optimizer that is made then,
    weights that are loaded, and gradients that are cleared would be those of copies that the next step drops. For
    all forwards of a `generate`, `generate_alone` does it once.
    """
    if not torch.is_grad_enabled() and not generates(model):
        model.reshard()


def _refuse_unready(model: Any) -> None:
    if isinstance(model, OdcModule):
        raise ConfigError(
            f"this {type(model).__name__} is sharded already, by a trainer before: save it there, and load it anew"
        )
    if not dist.is_initialized() and "LOCAL_RANK" not in os.environ:
        refuse_setting("a single process", "start it with torchrun or accelerate launch")


def _refuse_late_accelerator(model: Any) -> None:
    def check(*unused: Any) -> None:
        handle.remove()
        found = AcceleratorOptions.current()
        if found != AcceleratorOptions():
            raise ConfigError(f"prepare(model) did not know of {found}: make the Accelerator first")

    handle = model.register_forward_pre_hook(check)


def _prepare_reference(model: Any, **options: Any) -> None:
    """Shard a model that is only evaluated, with the precision of the trained one in place of autocast."""
    if (plain := model.__dict__.pop("_original_forward", None)) is not None:
        model.forward = plain
    model.requires_grad_(False)  # before it is sharded: no memory is kept for gradients
    prepare(model, **options)


class OdcTrainer(RecoveringTrainer):
    """A Trainer whose model is sharded over the world, in place, with on-demand communication.

    It works with Trainers of other libraries too: `class OdcSFTTrainer(OdcTrainer, trl.SFTTrainer)`. It runs on every
    rank of a process group (torchrun). Saving and loading are collectives, which a Trainer calls on every rank anyway;
    one rank writes the whole model and the whole optimizer state. `blocks` are class names of the model's blocks, if it
    does not name them itself; `given` and `options` are the Trainer's, without `model_init` and `optimizers`. Raises
    ConfigError if odc can neither apply nor ignore an argument, with what to use instead.

    With `max_tokens`, the `per_device_train_batch_size` x ranks samples of each optimizer step are spread over the
    ranks by LB-Mini, in microbatches of at most that many tokens, padding not counted. Ranks have as many as the plan
    gives them, and meet once a step. With `split` as well, long samples run as pieces on several ranks of a host
    (`odc.split`), and a sample may have `max_tokens` on each of them.

    With `recovery`, made before `args`, a rank that ends costs one step, and not the job (docs/recovery.md).
    """

    def __init__(
        self,
        model: Any = None,
        *given: Any,
        args: Any = None,
        blocks: str | Iterable[str] | None = None,
        settings: Settings | None = None,
        max_tokens: int | None = None,
        split: bool = False,
        recovery: Recovery | None = None,
        **options: Any,
    ) -> None:
        if options.get("model_init") is not None:
            refuse_setting("model_init", "pass the model itself, because it is sharded once")
        if any(one is not None for one in options.get("optimizers", ())):
            refuse_setting("optimizers made before the model is sharded", "use optimizer_cls_and_kwargs")
        if len(given) == 1 and isinstance(given[0], TrainingArguments):
            args, given = given[0], ()  # next to the model, also where TRL's Trainers take a reference or rewards
        if not given:
            options["model"] = model
        if args is not None:
            options["args"] = args
        args = next((one for one in given if isinstance(one, TrainingArguments)), args)
        if args is not None:
            refuse_arguments(args)
        self._max_tokens, self._split = max_tokens, split
        self._splitter: Splitter | None = None
        self._scaled: ScaledLoss | None = None
        self._evaluated = False  # since the last step
        with alone(recovery), without_communicator(args):
            super().__init__(*((model, *given) if given else ()), **options)
        if self.model_init is not None or self.optimizer is not None:  # by position
            refuse_setting("model_init or optimizers", "pass a model, and optimizer_cls_and_kwargs")
        optimizer: Any = getattr(self, "optimizer_cls_and_kwargs", None)
        if optimizer and "params" in optimizer[1]:  # of the whole model, which no step would change
            refuse_setting(
                "params in optimizer_cls_and_kwargs", "override create_optimizer; self.model is sharded there"
            )
        refuse_arguments(self.args)
        if split and max_tokens is None:
            raise ConfigError("split=True needs max_tokens, the most tokens of a microbatch and of a piece")
        if max_tokens is not None:
            refuse_unplanned(self, max_tokens)
        if split:
            refuse_unsplittable(self)
        if recovery is not None:
            refuse_unrepeatable(self, max_tokens, split)
            self.recover_by(recovery)
        self._kind = type(self.model)
        self.accelerator.device_placement = True
        settings = settings_for(self.args, settings)
        self._timeout_s = (settings or Settings()).timeout_s
        prepare(self.model, blocks=blocks, settings=settings)
        if isinstance(reference := getattr(self, "ref_model", None), torch.nn.Module):  # of TRL's trainers
            _prepare_reference(reference, blocks=blocks, settings=settings)
        if serves(self.args):
            serve_from_shards(self)

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's. No whole model, TRL's reference included, goes to a device before it is sharded."""
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if self.accelerator.device_placement:
            super()._move_model_to_device(model, device)

    def train(self, *args: Any, **options: Any) -> Any:
        """As the Trainer's; frees the arenas of split samples at its end."""
        result = super().train(*args, **options)
        if self._splitter is not None:
            self._splitter.close()
        return result

    def get_train_dataloader(self) -> Any:
        """As the Trainer's; with `max_tokens`, a loader of planned steps."""
        stock = super().get_train_dataloader()
        if self._max_tokens is None:
            return stock
        args, world = self.args, self.args.world_size
        lengths = lengths_of(self.train_dataset, args.length_column_name)
        node = ranks_of_host() if self._split else None
        if self._split:
            refuse_documents(self.train_dataset)
        refuse_mixed_rows(self.model, stock)
        steps = PlannedSteps(
            self._get_train_sampler(self.train_dataset),
            lengths,
            self._train_batch_size * world,
            self._max_tokens,
            cost_of_model(self.model),
            rank=args.process_index,
            world=world,
            seed=args.seed if args.data_seed is None else args.data_seed,
            epoch=lambda: int(self.state.epoch or 0),  # at the end of the first it is 1.0
            drop_last=args.dataloader_drop_last,
            split=node,
        )
        if self._split:
            longest = max(range(len(lengths)), key=lengths.__getitem__)
            with torch.random.fork_rng([]):  # a collator may draw
                row_of(stock.collate_fn([stock.dataset[longest]]), lengths[longest])
            keep = not args.gradient_checkpointing  # a recompute puts keys and values once more
            most = min(self._max_tokens, longest_piece(max(lengths)))
            self._splitter = Splitter(
                self.model, max(lengths), piece_tokens=most, keep=keep, node=node, timeout_s=self._timeout_s
            )
        return planned_loader(stock, steps)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """The batches of an optimizer step, and the tokens of all ranks that its loss is divided by."""
        if self._max_tokens is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        steps = [step for _, step in zip(range(num_batches), epoch_iterator, strict=False)]
        none = {"labels": torch.full((1, 2), NO_LABEL)}  # the count is a collective, also for a rank without samples
        counted = [batch for step in steps for batch in step.counted(self.args.process_index)]
        if any("labels" not in batch for batch in counted):
            refuse_setting("max_tokens to batches without labels", "a loss is divided by their count")
        return steps, self._get_num_items_in_batch(counted or [none], device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Forward and backward of a batch, or of this rank's microbatches of a planned step; its loss."""
        self._leave_evaluation(model)
        if not isinstance(inputs, StepOfRank):
            return super().training_step(model, inputs, num_items_in_batch)
        loss = torch.zeros((), device=self.args.device)
        with model.minibatch(), local_metrics(self.accelerator):
            if inputs.split is not None:
                assert self._splitter is not None, "made with the loader that planned the step"
                for piece in self._splitter.pieces(inputs.split.plan):
                    given = arguments_of(piece, self._prepare_inputs(inputs.split.rows[piece.sample]))
                    loss += super().training_step(model, given, num_items_in_batch)
            for number, microbatch in enumerate(inputs.microbatches, 1):
                model.set_is_last_backward(number == len(inputs.microbatches))
                loss += self._step_of(model, microbatch, num_items_in_batch)
        return loss

    def _step_of(self, model: Any, microbatch: PlannedMicrobatch, count: torch.Tensor) -> torch.Tensor:
        """Forward and backward of a planned microbatch; its loss, with its share of the step's router loss."""
        if self._scaled is None:
            self._scaled = ScaledLoss(self)
        with RouterLoss(model, microbatch.weight, wanted=wants_router_loss(self)) as router:
            halved = self._scaled.halved(model, microbatch.rows, count)
            loss: torch.Tensor = super().training_step(model, microbatch.rows, count)
        self._scaled.compare(loss, halved, router.counted)
        return loss + router.missing

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """As the Trainer's."""
        self._evaluated = True
        return super().evaluation_loop(*args, **options)

    def _leave_evaluation(self, model: Any) -> None:
        """Bring back the weights that an optimizer trains on, also on a rank without microbatches, if it has others for
        evaluation, as schedule-free ones do: those are what an evaluation has published.
        """
        back = getattr(getattr(self.optimizer, "optimizer", None), "train", None)
        if callable(back):
            back()
            if self._evaluated:
                model.publish()
        self._evaluated = False

    def floating_point_ops(self, inputs: Any) -> int:
        """As the Trainer's, of all microbatches of a planned step."""
        some = inputs.counted(self.args.process_index) if isinstance(inputs, StepOfRank) else [inputs]
        return sum(super(OdcTrainer, self).floating_point_ops(one) for one in some)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model (of a PEFT model the adapter) to `output_dir` on one rank. Every rank calls it."""
        weights = saved_weights(self.model)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=WHOLE)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / "optimizer.pt")
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        model = model or self.model
        if hasattr(model, "peft_config") and not isinstance(model, PreTrainedModel):
            set_model_state_dict(model, adapter_weights(model, resume_from_checkpoint), options=_PART)
        else:
            load_weights(model, self._kind, resume_from_checkpoint, self._reading)

    @property
    def _reading(self) -> StateDictOptions:
        """How whole states are loaded: by one rank, which hands them on, as each takes the memory of all ranks' shards.

        A rank may be lost meanwhile where ranks recover; there each reads all, and waits for none.
        """
        return _FROM_FIRST if self._loop is None else WHOLE

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        files = [Path(checkpoint) / name for name in ("optimizer.pt", "optimizer.bin")] if checkpoint else []
        if found := [file for file in files if file.is_file()]:  # none of save_only_model; the second is FSDP's
            state = torch.load(found[0], weights_only=True) if reads(self._reading) else {}
            load_optimizer(self.model, self.optimizer.optimizer, state, self._reading)
            schedule = torch.load(found[0].with_name("scheduler.pt"), weights_only=True)
            self.lr_scheduler.load_state_dict(schedule)
        with without_stock_loading():
            super()._load_optimizer_and_scheduler(checkpoint)  # TRL's load what else they have
