"""Losses of a Trainer under `max_tokens`, on two CPU ranks: router losses weighed by tokens, means refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import RanksFailed
from support.trainers import Logged, arguments, as_torchrun, differences, logged, mixture, model, padded, samples

from odc.experiments.data.bpe import ByteTokenizer

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make test-integrations",
)
#: Two ranks with three samples each have 64 tokens each, in three and two microbatches of at most `CAP`.
LENGTHS, CAP = [40, 12, 12, 22, 22, 20] * 3, 41
CHANGES: dict[str, Any] = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 3}
CHANGES |= {"train_sampling_strategy": "sequential", "bf16": False}


def linear_router_loss(logits: Any, experts: Any = None, top_k: Any = None, mask: Any = None, **unused: Any) -> Any:
    """In place of the balance of experts, which is not linear in tokens: a mean over tokens of a function of each."""
    each = sum(layer.float().logsumexp(-1).square() for layer in logits)
    mask = torch.ones_like(each) if mask is None else mask.reshape(-1).float()
    return (each * mask).sum() / mask.sum()


@contextmanager
def router_loss(linear: bool) -> Iterator[None]:
    from transformers.models.mixtral import modeling_mixtral

    stock = modeling_mixtral.load_balancing_loss_func
    with mock.patch.object(modeling_mixtral, "load_balancing_loss_func", linear_router_loss if linear else stock):
        yield


def trainer_of(kind: str, folder: Path, max_tokens: int | None) -> Any:
    """A stock trainer, or with `max_tokens` that of odc."""
    from transformers import Trainer

    from odc.integrations.transformers import OdcTrainer

    options: dict[str, Any] = {"max_tokens": max_tokens} if max_tokens else {}
    if kind == "Trainer":
        made: Any = OdcTrainer if max_tokens else Trainer
        args = arguments(folder, **CHANGES)
        return made(model=mixture(), args=args, train_dataset=samples(LENGTHS), data_collator=padded, **options)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class OdcSFTTrainer(OdcTrainer, SFTTrainer): ...

    if dist.get_rank() == 0:
        ByteTokenizer().save(folder / "tokenizer")
    dist.barrier()
    return (OdcSFTTrainer if max_tokens else SFTTrainer)(
        model=mixture(ByteTokenizer.vocab_size),
        args=arguments(folder, SFTConfig, **CHANGES),
        train_dataset=Dataset.from_list(samples(LENGTHS)),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        **options,
    )


def routed(rank: int, world: int, kind: str, folder: Path, max_tokens: int | None) -> tuple[Logged, int]:
    """Logged steps with a linear router loss, and forwards with gradients that this rank ran."""
    as_torchrun(rank, world)
    counts: list[int] = []
    with router_loss(linear=True):
        trainer = trainer_of(kind, folder, max_tokens)
        trainer.model.register_forward_pre_hook(lambda *unused: counts.append(torch.is_grad_enabled()))
        trainer.train()
    return logged(trainer), sum(counts)


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_a_router_loss_is_that_of_the_stock_run_with_one_microbatch_a_rank(ranks, tmp_path, kind: str) -> None:
    if kind == "SFTTrainer":
        pytest.importorskip("trl", reason="needs trl: make test-integrations")
    (theirs, one), _ = ranks(2).run(routed, kind, tmp_path / "stock", None, timeout=500)
    (ours, few), (_, many) = ranks(2).run(routed, kind, tmp_path / "odc", CAP, timeout=500)
    assert one == 3 and sorted((few, many)) == [6, 9], "of three steps"
    assert max(differences(ours, theirs)) < 1e-4, (ours, theirs)


def balanced(rank: int, world: int, folder: Path) -> tuple[Logged, Logged]:
    """The first logged step with the stock router loss, and what it should be by the microbatches of all ranks."""
    as_torchrun(rank, world)
    seen: list[dict[str, torch.Tensor]] = []

    def see(module: Any, args: Any, given: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not trainer.state.global_step:
            seen.append({name: given[name].clone() for name in ("input_ids", "attention_mask", "labels")})

    trainer = trainer_of("Trainer", folder, CAP)
    trainer.model.register_forward_pre_hook(see, with_kwargs=True)
    trainer.train()
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, seen)
    like, batches = mixture().train(), [batch for each in everywhere for batch in each]
    tokens = sum(float(batch["attention_mask"].sum()) for batch in batches)
    targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = torch.zeros(())
    for batch in batches:
        found = like(**batch, num_items_in_batch=targets)
        share = float(batch["attention_mask"].sum()) / tokens
        # The stock Trainer multiplies by the number of ranks, the router loss too.
        total = total + (found.loss - found.aux_loss) + world * share * found.aux_loss
    total.backward()
    norm = torch.cat([weight.grad.flatten() for weight in like.parameters() if weight.grad is not None]).norm()
    return logged(trainer)[:1], [(float(total), float(norm))]


def test_balancing_losses_of_microbatches_are_weighed_by_their_tokens(ranks, tmp_path) -> None:
    ours, expected = ranks(2).run(balanced, tmp_path, timeout=500)[0]
    assert max(differences(ours, expected)) < 1e-4, (ours, expected)


def kinds_of_loss() -> dict[str, Any]:
    """Subclasses with a `compute_loss` of their own."""
    from odc.integrations.transformers import OdcTrainer

    class Mean(OdcTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **given: Any) -> Any:
            return model(**inputs).loss

    class SaysSum(Mean):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **given: Any) -> Any:
            return super().compute_loss(model, inputs)

    class Sum(OdcTrainer):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **given: Any) -> Any:
            ranks = dist.get_world_size()
            return ranks * model(**inputs, num_items_in_batch=num_items_in_batch).loss

    return {"Mean": Mean, "SaysSum": SaysSum, "Sum": Sum, "OdcTrainer": OdcTrainer}


def a_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def classifier() -> Any:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    config: Qwen2Config = model().config
    config.num_labels, config.pad_token_id, config.problem_type = 60, 0, "multi_label_classification"
    return Qwen2ForSequenceClassification(config)


def hiding() -> Any:
    """A mixture whose output does not have its router loss."""
    from transformers import MixtralForCausalLM
    from transformers.modeling_outputs import CausalLMOutput

    class Hides(MixtralForCausalLM):
        def forward(self, input_ids: Any, attention_mask: Any, labels: Any, **given: Any) -> Any:
            found = super().forward(input_ids, attention_mask, labels=labels, **given)
            return CausalLMOutput(loss=found.loss, logits=found.logits)

    return Hides(mixture().config)


def of_classes(rows: Any) -> Any:
    return padded(rows) | {"labels": torch.ones(len(rows), 60)}


def unlabelled(rows: Any) -> Any:
    return {name: one for name, one in padded(rows).items() if name != "labels"}


def own_loss(
    rank: int, world: int, kind: str, folder: Path, options: dict[str, Any], net: Any = model, collate: Any = padded
) -> Logged:
    as_torchrun(rank, world)
    args, rows = arguments(folder, **CHANGES), samples(LENGTHS)
    trainer = kinds_of_loss()[kind](model=net(), args=args, train_dataset=rows, data_collator=collate, **options)
    trainer.train()
    return logged(trainer)


@pytest.mark.parametrize(
    ("kind", "options", "net", "collate", "message"),
    [
        ("Mean", {}, model, padded, "with compute_loss of Mean: set loss_is_scaled_for_ga = True in its class"),
        ("SaysSum", {}, model, padded, "Qwen2ForCausalLM under SaysSum: it is .* for twice num_items_in_batch"),
        (
            "OdcTrainer",
            {"compute_loss_func": a_mean},
            model,
            padded,
            "under OdcTrainer: it is .* for twice num_items_in",
        ),
        (
            "OdcTrainer",
            {},
            classifier,
            of_classes,
            "Qwen2ForSequenceClassification under OdcTrainer: .* should be half",
        ),
        ("OdcTrainer", {}, hiding, padded, "its output has no aux_loss; set output_router_logits=False"),
        ("OdcTrainer", {}, model, unlabelled, "max_tokens to batches without labels"),
    ],
)
def test_a_loss_that_cannot_be_added_up_is_refused(ranks, tmp_path, kind, options, net, collate, message) -> None:
    with pytest.raises(RanksFailed, match=message):
        ranks(2).run(own_loss, kind, tmp_path, {"max_tokens": CAP, **options}, net, collate, timeout=500)


def test_a_loss_of_ones_own_that_is_a_sum_is_the_stock_one(ranks, tmp_path) -> None:
    theirs = ranks(2).run(own_loss, "OdcTrainer", tmp_path, {}, timeout=500)[0]
    ours = ranks(2).run(own_loss, "Sum", tmp_path, {"max_tokens": CAP}, timeout=500)[0]
    assert max(differences(ours, theirs)) < 1e-4, (ours, theirs)


class Bare(torch.nn.Module):
    """None of transformers' models: it has no configuration."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(60, 16), torch.nn.Linear(16, 60)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.table(input_ids))}


def a_sum(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def test_a_module_without_a_configuration_is_planned_too(ranks, tmp_path) -> None:
    given = {"compute_loss_func": a_sum, "blocks": "Linear"}
    theirs = ranks(2).run(own_loss, "OdcTrainer", tmp_path, given, Bare, timeout=500)[0]
    ours = ranks(2).run(own_loss, "OdcTrainer", tmp_path, {"max_tokens": CAP, **given}, Bare, timeout=500)[0]
    assert max(differences(ours, theirs)) < 1e-4, (ours, theirs)


@pytest.mark.parametrize(("smoother", "known"), [(None, True), (object(), False)])
def test_the_loss_of_smoothed_labels_is_checked_for_trls_trainer_too(smoother: Any, known: bool) -> None:
    pytest.importorskip("trl", reason="needs trl: make test-integrations")
    from trl import SFTTrainer

    from odc.integrations.transformers_loss import ScaledLoss

    trainer = mock.Mock(compute_loss=SFTTrainer.compute_loss, compute_loss_func=None, label_smoother=smoother)
    assert ScaledLoss(trainer)._done == known


def counted(rank: int, world: int, folder: Path) -> tuple[float, int]:
    """The tokens that SFTTrainer has logged with smoothed labels, and those of the microbatches that this rank ran."""
    as_torchrun(rank, world)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from odc.integrations.transformers import OdcTrainer

    class OdcSFTTrainer(OdcTrainer, SFTTrainer): ...

    if dist.get_rank() == 0:
        ByteTokenizer().save(folder / "tokenizer")
    dist.barrier()
    trainer = OdcSFTTrainer(
        model=model(ByteTokenizer.vocab_size),
        args=arguments(folder, SFTConfig, **CHANGES, label_smoothing_factor=0.1),
        train_dataset=Dataset.from_list(samples(LENGTHS)),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        max_tokens=CAP,
    )
    seen: list[int] = []

    def see(module: Any, args: Any, given: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            seen.append(int(given["attention_mask"].sum()))

    trainer.model.register_forward_pre_hook(see, with_kwargs=True)
    trainer.train()
    return [one["num_tokens"] for one in trainer.state.log_history if "num_tokens" in one][-1], sum(seen)


def test_the_check_of_a_loss_adds_nothing_to_the_metrics_of_trls_trainer(ranks, tmp_path) -> None:
    pytest.importorskip("trl", reason="needs trl: make test-integrations")
    for logged_tokens, tokens in ranks(2).run(counted, tmp_path, timeout=500):
        assert logged_tokens == tokens > 0
