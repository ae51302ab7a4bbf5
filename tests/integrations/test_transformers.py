"""Small runs of Hugging Face's Trainer against the same runs of OdcTrainer, on two CPU ranks."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import RanksFailed
from support.trainers import Logged, arguments, as_torchrun, differences, logged, model, padded, samples

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
    resumed = ranks(2).run(train, True, tmp_path / "rest", str(tmp_path / "odc" / "checkpoint-3"))[0]
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
    "rmsprop": {"optim": "rmsprop"},
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


def precision(rank: int, world: int, ours: bool, folder: Path, changes: dict[str, Any]) -> tuple[Logged, set[str]]:
    """Logged steps, and the dtypes of a block's activations and of the logits."""
    as_torchrun(rank, world)
    trainer, seen = make(ours, folder, changes), set()
    block = trainer.model.model.layers[0].mlp
    block.register_forward_hook(
        lambda module, inputs, output: seen.update(f"block {x.dtype}" for x in (*inputs, output))
    )
    trainer.model.register_forward_hook(lambda module, inputs, output: seen.add(f"logits {output.logits.dtype}"))
    trainer.train()
    return logged(trainer), seen


def test_bf16_computes_in_bf16_and_returns_fp32(ranks, tmp_path) -> None:
    theirs = ranks(2).run(precision, False, tmp_path, {"bf16": True}, timeout=500)[0]
    ours = ranks(2).run(precision, True, tmp_path, {"bf16": True}, timeout=500)[0]
    assert ours[1] == {"block torch.bfloat16", "logits torch.float32"}
    loss, norm = differences(ours[0], theirs[0])
    assert loss < 1e-3 and norm < 1e-2, (ours, theirs)
    without = ranks(2).run(precision, True, tmp_path, {}, timeout=500)[0]
    assert without[1] == {"block torch.float32", "logits torch.float32"}


def recomputed(rank: int, world: int, ours: bool, folder: Path, changes: dict[str, Any]) -> tuple[Logged, int]:
    """Logged steps, and how often a block's forward began."""
    as_torchrun(rank, world)
    trainer, runs = make(ours, folder, changes), []
    trainer.model.model.layers[0].mlp.register_forward_pre_hook(lambda *unused: runs.append(1))
    trainer.train()
    return logged(trainer), len(runs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_recomputes_and_changes_nothing(ranks, tmp_path, reentrant: bool) -> None:
    changes = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    theirs, once = ranks(2).run(recomputed, False, tmp_path, {}, timeout=500)[0]
    ours, runs = ranks(2).run(recomputed, True, tmp_path, changes, timeout=500)[0]
    assert max(differences(ours, theirs)) < 1e-4, (ours, theirs)
    assert runs == 2 * once > 0


def compiled(rank: int, world: int, folder: Path, changes: dict[str, Any]) -> tuple[Logged, int]:
    """Logged steps, and how many frames dynamo compiled meanwhile."""
    from torch._dynamo.utils import counters

    as_torchrun(rank, world)
    before = counters["frames"]["ok"]
    trainer = make(True, folder, changes, samples([24] * 16))
    trainer.train()
    return logged(trainer), counters["frames"]["ok"] - before


def test_blocks_are_compiled(ranks, tmp_path) -> None:
    eager, none = ranks(2).run(compiled, tmp_path, {}, timeout=500)[0]
    ours, frames = ranks(2).run(compiled, tmp_path, {"torch_compile_backend": "eager"}, timeout=500)[0]
    assert none == 0 and frames > 0
    assert max(differences(ours, eager)) < 1e-4, (ours, eager)


def determined(rank: int, world: int, folder: Path) -> list[bool]:
    """Whether the runtime's sums are reproducible, with `full_determinism` and without."""
    from odc.fsdp import root_of

    as_torchrun(rank, world)
    found = []
    try:
        for chosen in (True, False):
            trainer = make(True, folder, {"full_determinism": chosen, "max_steps": 1})
            trainer.train()
            found.append(root_of(trainer.model).settings.reproducible)
    finally:
        torch.use_deterministic_algorithms(False)
    return found


def test_full_determinism_asks_for_reproducible_sums(ranks, tmp_path) -> None:
    assert ranks(2).run(determined, tmp_path, timeout=500) == [[True, False]] * 2


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
