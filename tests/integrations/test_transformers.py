"""Small runs of Hugging Face's Trainer against the same runs of OdcTrainer, on two CPU ranks."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.ranks import RanksFailed
from support.trainers import Logged, arguments, as_torchrun, differences, logged, model, padded, samples, stepped
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from odc.errors import ConfigError

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make test-integrations",
)


def make(ours: bool, folder: Path, changes: dict[str, Any], rows: Any = None) -> Any:
    from transformers import Trainer

    from odc.integrations.transformers import OdcTrainer

    kind, data = OdcTrainer if ours else Trainer, samples() if rows is None else rows
    args = arguments(folder, **copy.deepcopy(changes))  # a Trainer writes into what it is given
    return kind(model=model(), args=args, train_dataset=data, eval_dataset=samples()[:8], data_collator=padded)


def train(rank: int, world: int, ours: bool, folder: Path, resume: str | None = None) -> tuple[Logged, float]:
    """Logged losses and gradient norms, and the loss of a last evaluation."""
    as_torchrun(rank, world)
    trainer = make(ours, folder, {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3})
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return logged(trainer), trainer.evaluate()["eval_loss"]


def alike(ours: tuple[Logged, float], theirs: tuple[Logged, float]) -> None:
    assert len(theirs[0]) == 8
    assert max(differences(ours[0], theirs[0])) < 1e-3, (ours, theirs)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-3)


def test_a_run_is_that_of_the_stock_trainer_and_can_be_resumed(ranks, tmp_path) -> None:
    theirs = ranks(2).run(train, False, tmp_path / "ddp")[0]
    ours = ranks(2).run(train, True, tmp_path / "odc")[0]
    alike(ours, theirs)
    for begun in ("odc", "ddp"):
        resumed = ranks(2).run(train, True, tmp_path / "rest", str(tmp_path / begun / "checkpoint-3"))[0]
        alike(resumed, theirs)

    from transformers import AutoConfig, AutoModelForCausalLM

    assert AutoConfig.from_pretrained(tmp_path / "odc").architectures == ["Qwen2ForCausalLM"]
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "odc").state_dict()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "ddp").state_dict()
    for name, weight in stock.items():
        torch.testing.assert_close(whole[name], weight, rtol=1e-2, atol=1e-3)


#: Arguments that change a run. Each is run by both Trainers.
CHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "label smoothing": {"label_smoothing_factor": 0.2},
    "neftune": {"neftune_noise_alpha": 5.0},
    "sgd": {"optim": "sgd", "learning_rate": 0.5},
    "adagrad": {"optim": "adagrad"},
    "rmsprop": {"optim": "rmsprop", "learning_rate": 1e-3},  # its first step is ten times that
    "schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 1},
    "decay": {"weight_decay": 0.9, "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-3},
    "clipping": {"max_grad_norm": 0.1, "optim": "sgd", "learning_rate": 0.5},
    "tokens of a rank": {"average_tokens_across_devices": False},
    "batches": {"accelerator_config": {"split_batches": True}, "train_sampling_strategy": "group_by_length"},
    "seed": {"data_seed": 7},
    "best model": {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the first, whose loss is the largest
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    },
}


def changed(rank: int, world: int, ours: bool, folder: Path) -> dict[str, Logged]:
    """Of every entry of `CHANGES`, the logged steps and (twice) the loss of an evaluation after them."""
    as_torchrun(rank, world)
    found = {}
    for name, changes in CHANGES.items():
        trainer = make(ours, folder / name, changes)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        found[name] = [*logged(trainer), (loss, loss)]
    return found


def test_arguments_have_the_effect_that_they_have_in_the_stock_trainer(ranks, tmp_path) -> None:
    theirs = ranks(2).run(changed, False, tmp_path / "ddp", timeout=500)[0]
    ours = ranks(2).run(changed, True, tmp_path / "odc", timeout=500)[0]
    for name in CHANGES:
        assert max(differences(ours[name], theirs[name])) < 1e-4, (name, ours[name], theirs[name])
        if name != "none":
            assert max(differences(theirs[name], theirs["none"])) > 1e-3, f"{name}: this shows nothing"


def observed(rank: int, world: int, ours: bool, folder: Path, changes: dict[str, Any]) -> tuple[Logged, dict[str, Any]]:
    """Logged steps of samples of one length; the dtypes of a block's activations and of the logits, forwards of the
    block, frames that dynamo compiled, and whether the runtime's sums are reproducible.
    """
    from torch._dynamo.utils import counters

    from odc.fsdp import root_of

    as_torchrun(rank, world)
    before = counters["frames"]["ok"]
    trainer = make(ours, folder, changes, samples([24] * 16))
    seen: dict[str, Any] = {"block": set(), "logits": set(), "runs": 0}

    def note(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        seen["block"] |= {one.dtype for one in (*inputs, output)}

    def begun(*unused: Any) -> None:
        seen["runs"] += 1

    block = trainer.model.model.layers[0].mlp
    if "torch_compile_backend" not in changes:  # dynamo would trace the hooks
        block.register_forward_hook(note)
        block.register_forward_pre_hook(begun)
    trainer.model.register_forward_hook(lambda module, inputs, output: seen["logits"].add(output.logits.dtype))
    try:
        trainer.train()
    finally:
        torch.use_deterministic_algorithms(False)
    seen["reproducible"] = ours and root_of(trainer.model).settings.reproducible
    return logged(trainer), seen | {"frames": counters["frames"]["ok"] - before}


RECOMPUTED = {"gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("changes", "near", "shows"),
    [
        ({}, (1e-4, 1e-4), {"block": {torch.float32}, "frames": 0, "reproducible": False}),
        ({"bf16": True}, (1e-3, 2e-2), {"block": {torch.bfloat16}}),  # five roundings to bf16
        (RECOMPUTED | {"gradient_checkpointing_kwargs": {"use_reentrant": False}}, (1e-4, 1e-4), {"runs": 2}),
        (RECOMPUTED | {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, (1e-4, 1e-4), {"runs": 2}),
        ({"torch_compile_backend": "eager"}, (1e-4, 1e-4), {}),
        ({"full_determinism": True}, (1e-4, 1e-4), {"reproducible": True}),
    ],
    ids=["plain", "bf16", "recomputed", "recomputed by reentering", "compiled", "determined"],
)
def test_ways_to_compute_are_applied_and_change_no_loss(ranks, tmp_path, changes, near, shows) -> None:
    stock = {"bf16": True} if "bf16" in changes else {}
    theirs, once = ranks(2).run(observed, False, tmp_path / "ddp", stock, timeout=500)[0]
    ours, seen = ranks(2).run(observed, True, tmp_path / "odc", changes, timeout=500)[0]
    loss, norm = differences(ours, theirs)
    assert loss < near[0] and norm < near[1], (ours, theirs)
    assert seen["logits"] == {torch.float32}
    expected = shows | ({"runs": shows["runs"] * once["runs"]} if "runs" in shows else {})
    assert {name: seen[name] for name in shows} == expected
    assert "torch_compile_backend" not in changes or seen["frames"] > 0


def own_loop(rank: int, world: int, after: bool, changes: dict[str, Any]) -> set[str]:
    """Dtypes of a block's activations under an Accelerator made before `prepare`, or after it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from odc.integrations.transformers import prepare

    as_torchrun(rank, world)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = None if after else Accelerator(cpu=True, **changes)
    net, seen = prepare(model()), set()
    net.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.add(str(output.dtype)))
    accelerator = accelerator or Accelerator(cpu=True, **changes)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    accelerator.backward(net(**padded(samples([8]))).loss)
    optimizer.step()
    return seen


def test_an_accelerators_precision_is_applied_or_the_order_refused(ranks) -> None:
    assert ranks(2).run(own_loop, False, {"mixed_precision": "bf16"})[0] == {"torch.bfloat16"}
    assert ranks(2).run(own_loop, False, {"mixed_precision": "no"})[0] == {"torch.float32"}
    assert ranks(2).run(own_loop, True, {"mixed_precision": "no"})[0] == {"torch.float32"}
    with pytest.raises(RanksFailed, match="make the Accelerator first"):
        ranks(2).run(own_loop, True, {"mixed_precision": "bf16"})


def generated(rank: int, world: int, lora: bool) -> tuple[list[int], list[int], int]:
    """Tokens that the whole model and the sharded one generate, and how many forwards of a block that took."""
    as_torchrun(rank, world)
    from odc.integrations.transformers import prepare

    net = model()
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)  # of the adapter
        net = get_peft_model(net, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    given = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    given |= {"max_new_tokens": 2 + 5 * rank, "do_sample": False, "pad_token_id": 0, "eos_token_id": 59}
    expected = net.generate(**given)[0].tolist()
    prepare(net)
    runs: list[int] = []
    inner = net.get_base_model() if lora else net
    inner.model.layers[0].register_forward_pre_hook(lambda *unused: runs.append(1))
    return expected, net.generate(**given)[0].tolist(), len(runs)


@pytest.mark.parametrize("lora", [False, True])
def test_each_rank_generates_with_forwards_for_its_own_tokens(ranks, lora: bool) -> None:
    if lora:
        pytest.importorskip("peft", reason="needs peft: make test-integrations")
    for expected, ours, forwards in ranks(2).run(generated, lora):
        assert ours == expected and forwards == len(ours) - 3


def generated_to_be_scored(rank: int, world: int, folder: Path) -> int:
    """Forwards of a rank whose answers a Seq2SeqTrainer asks for; the ranks have unequally many."""
    from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from odc.integrations.transformers import OdcTrainer

    class Ours(OdcTrainer, Seq2SeqTrainer): ...

    as_torchrun(rank, world)
    args = arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True)
    args.generation_config = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=59)
    net, runs = model(), list[int]()
    net.config.pad_token_id = 0
    trainer = Ours(model=net, args=args, train_dataset=samples(), data_collator=padded)
    trainer.model.model.layers[0].register_forward_pre_hook(lambda *unused: runs.append(1))
    for _ in range(1 + rank):
        trainer.prediction_step(trainer.model, padded(samples()[:2]), prediction_loss_only=False)
    return len(runs)


def test_answers_that_a_trainer_asks_for_are_generated_by_each_rank_alone(ranks, tmp_path) -> None:
    """In step with the others the second rank would wait for the first for ever."""
    first, second = ranks(2).run(generated_to_be_scored, tmp_path)
    assert second == 2 * first > 0


def moved(rank: int, world: int, folder: Path, ours: bool) -> int:
    """How many whole models are moved to a device while a Trainer is made."""
    as_torchrun(rank, world)
    count, real = 0, torch.nn.Module.to

    def to(module: torch.nn.Module, *where: Any, **options: Any) -> torch.nn.Module:
        nonlocal count
        count += not any(isinstance(one, DTensor) for one in module.parameters())
        return real(module, *where, **options)

    with mock.patch.object(torch.nn.Module, "to", to):
        trainer = make(ours, folder, {})
    assert trainer.accelerator.device_placement, "batches go to the device"
    return count


def test_no_whole_model_is_moved_to_a_device(ranks, tmp_path) -> None:
    assert ranks(2).run(moved, tmp_path, False) == [1, 1], "this shows nothing"
    assert ranks(2).run(moved, tmp_path, True) == [0, 0]


def read(rank: int, world: int, folder: Path, only_model: bool) -> list[str]:
    """What a rank reads of a checkpoint of which all ranks need a part."""
    as_torchrun(rank, world)
    changes = {"save_strategy": "steps", "save_steps": 2, "save_only_model": only_model}
    make(True, folder, changes).train()
    trainer, found = make(True, folder, changes), list[str]()
    weights, state = trainer._kind.from_pretrained, torch.load

    def load(path: Any, **options: Any) -> Any:
        if isinstance(path, Path):  # torch loads what it has broadcast, too
            found.append(path.name)
        return state(path, **options)

    def from_pretrained(path: Any, **options: Any) -> Any:
        found.append("weights")
        return weights(path, **options)

    with mock.patch.object(torch, "load", load), mock.patch.object(trainer._kind, "from_pretrained", from_pretrained):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert trainer.state.global_step == 3
    return [name for name in found if name in ("weights", "optimizer.pt")]


@pytest.mark.parametrize("only_model", [False, True])
def test_one_rank_reads_a_checkpoint_for_all(ranks, tmp_path, only_model: bool) -> None:
    assert ranks(2).run(read, tmp_path, only_model) == [["weights"] if only_model else ["weights", "optimizer.pt"], []]


def test_planned_steps_are_loaded_by_workers_as_the_trainer_would_start_them() -> None:
    from odc.integrations.transformers_balance import planned_loader

    stock = DataLoader(samples(), num_workers=1, multiprocessing_context="spawn", in_order=False, collate_fn=padded)
    planned = planned_loader(stock, mock.MagicMock())
    assert planned.multiprocessing_context.get_start_method() == "spawn" and not planned.in_order
    assert planned_loader(DataLoader(samples(), collate_fn=padded), mock.MagicMock()).num_workers == 0


LONG = [60, 22, 22, 22] * 4  # the long one weighs what three others do, which need two microbatches of 64 tokens


def rebalanced(
    rank: int, world: int, folder: Path, strategy: str, max_tokens: int | None, resume: str | None
) -> tuple[Logged, list[int]]:
    """Of an epoch of four steps of four samples."""
    as_torchrun(rank, world)
    given: dict[str, Any] = {"max_tokens": max_tokens} if max_tokens else {}
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": -1}
    changes |= {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 3, "train_sampling_strategy": strategy}
    return stepped(folder, changes, samples(LONG), resume=resume, **given)


def test_ranks_run_unequal_microbatches_of_one_step(ranks, tmp_path) -> None:
    plain = ranks(2).run(rebalanced, tmp_path / "plain", "sequential", None, None, timeout=500)
    planned = ranks(2).run(rebalanced, tmp_path / "planned", "sequential", 64, None, timeout=500)
    assert max(differences(planned[0][0], plain[0][0])) < 1e-4, "the same samples a step, each counted once"
    counts = [found[1] for found in planned]
    assert all(len(rows) == 4 for rows in counts) and all(a != b for a, b in zip(*counts, strict=True)), counts
    resumed = ranks(2).run(rebalanced, tmp_path / "more", "sequential", 64, str(tmp_path / "planned" / "checkpoint-3"))
    assert max(differences(resumed[0][0], plain[0][0])) < 1e-4
    assert [found[1] for found in resumed] == [rows[3:] for rows in counts], "only the last step is left"


def joined(rank: int, world: int, folder: Path, kind: str, positions: bool) -> str:
    """The error of a planned Trainer for a model of this kind and a collator that joins samples."""
    from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

    from odc.integrations.transformers import OdcTrainer

    as_torchrun(rank, world)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **sizes, **({"num_local_experts": 4} if kind == "gpt_oss" else {}))
    net = AutoModelForCausalLM.from_config(config)
    collate = DataCollatorWithFlattening(return_position_ids=positions)
    args = arguments(folder, gradient_accumulation_steps=1)
    trainer = OdcTrainer(model=net, args=args, train_dataset=samples(), data_collator=collate, max_tokens=64)
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("kind", "positions", "message"),
    [
        ("llama", True, "trained"),
        ("llama", False, "samples end to end in one row, where llama models"),
        # Its masks are made without the positions.
        ("gpt_oss", True, "samples end to end in one row, where gpt_oss models with 'eager' attention"),
    ],
)
def test_samples_that_a_collator_joins_stay_apart(ranks, tmp_path, kind: str, positions: bool, message: str) -> None:
    assert message in ranks(2).run(joined, tmp_path, kind, positions)[0]


def test_a_mask_that_hides_the_borders_of_joined_samples_is_refused() -> None:
    """Positions that begin again are borders only where the collator gives no mask."""
    from transformers import DataCollatorWithFlattening

    from odc.integrations.transformers_rows import refuse_mixed_rows

    join = DataCollatorWithFlattening(return_position_ids=True)

    def masked(rows: Any) -> dict[str, torch.Tensor]:
        found = dict(join(rows))
        return found | {"attention_mask": torch.ones_like(found["input_ids"])}

    with pytest.raises(ConfigError, match=r"samples end to end .* position_ids and no attention_mask"):
        refuse_mixed_rows(model(), SimpleNamespace(dataset=samples(), collate_fn=masked))


def test_gradients_of_a_row_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import DataCollatorWithFlattening

    from odc.integrations import transformers_rows

    net = model()
    loader = SimpleNamespace(dataset=samples(), collate_fn=DataCollatorWithFlattening(return_position_ids=True))
    transformers_rows.refuse_mixed_rows(net, loader)
    monkeypatch.setattr(transformers_rows, "gradient_of", lambda model: torch.tensor([float("nan")]))
    with pytest.raises(ConfigError, match="output or gradients are off by nan"):
        transformers_rows.refuse_mixed_rows(net, loader)
