"""Checkpoints of a Trainer whose model has parameters without a gradient, or modules that its class does not make."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.trainers import Logged, arguments, as_torchrun, differences, logged, model, padded, samples

from odc.errors import ConfigError

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make test-integrations",
)


def made(ours: bool, folder: Path, net: Any, kind: Any = None, **changes: Any) -> Any:
    from transformers import Trainer

    from odc.integrations.transformers import OdcTrainer

    if not ours:
        changes["ddp_find_unused_parameters"] = True
    args = arguments(folder, save_strategy="steps", save_steps=1, **changes)
    data = {"train_dataset": samples(), "eval_dataset": samples()[:8], "data_collator": padded}
    return (kind or (OdcTrainer if ours else Trainer))(model=net, args=args, **data)


def late() -> Any:
    """A model whose class makes a module that its forward does not use."""
    from transformers import Qwen2ForCausalLM

    class Late(Qwen2ForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.late = torch.nn.Linear(32, 32, bias=False)
            self.post_init()

    torch.manual_seed(0)
    return Late(model().config)


def runs_of_late(rank: int, world: int, ours: bool, folder: Path, optim: str) -> list[Logged]:
    """Logged steps of a run whose module `late` is used from the third step on, and of the run resumed after two."""
    from transformers import TrainerCallback

    as_torchrun(rank, world)

    class Use(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            net = trainer.model
            if state.global_step == 2:
                net.model.norm.register_forward_hook(lambda module, inputs, output: output + net.late(output))

    runs = []
    for checkpoint in (None, str(folder / "checkpoint-2")):
        trainer = made(ours, folder, late(), optim=optim, max_steps=5)
        trainer.add_callback(Use())
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(logged(trainer))
    return runs


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_a_parameter_without_gradients_has_no_moments_in_a_resumed_run_either(ranks, tmp_path, optim: str) -> None:
    theirs = ranks(2).run(runs_of_late, False, tmp_path / "ddp", optim, timeout=500)[0]
    ours = ranks(2).run(runs_of_late, True, tmp_path / "odc", optim, timeout=500)[0]
    for found, stock in zip(ours, theirs, strict=True):
        assert len(found) == 5 and max(differences(found, stock)) < 1e-4, (found, stock)
    assert max(differences(theirs[1], theirs[0])) < 1e-4


def changed() -> Any:
    """A model with one module added and another replaced, which a new one of its class does not have."""
    net = model()
    other = copy.deepcopy(net.config)
    other.intermediate_size = 48
    net.model.layers[0].mlp = type(net.model.layers[0].mlp)(other)
    net.added = torch.nn.Linear(32, 32, bias=False)
    net.model.norm.register_forward_hook(lambda module, inputs, output: output + net.added(output))
    return net


def runs_of_changed(rank: int, world: int, ours: bool, folder: Path) -> list[Logged]:
    """Logged steps, and (twice) the loss of the best model, of a run and of the one resumed after its first step."""
    as_torchrun(rank, world)
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    best |= {"greater_is_better": True, "eval_strategy": "steps", "eval_steps": 1}  # the first, whose loss is largest
    runs = []
    for checkpoint in (None, str(folder / "checkpoint-1")):
        trainer = made(ours, folder, changed(), **best)
        trainer.train(resume_from_checkpoint=checkpoint)
        loss = trainer.evaluate()["eval_loss"]
        runs.append([*logged(trainer), (loss, loss)])
    return runs


def test_modules_that_were_added_or_replaced_are_resumed_and_loaded_as_the_best(ranks, tmp_path) -> None:
    theirs = ranks(2).run(runs_of_changed, False, tmp_path / "ddp", timeout=500)[0]
    ours = ranks(2).run(runs_of_changed, True, tmp_path / "odc", timeout=500)[0]
    for found, stock in zip(ours, theirs, strict=True):
        assert max(differences(found, stock)) < 1e-4, (found, stock)


def runs_with_more(rank: int, world: int, folder: Path) -> tuple[list[Logged], list[str | None]]:
    """Logged steps of a run and of the one resumed after its first step; the checkpoints of which a Trainer of another
    library has read what it has besides, as TRL's GRPOTrainer does.
    """
    as_torchrun(rank, world)
    from transformers import Trainer

    from odc.integrations.transformers import OdcTrainer

    class Besides(Trainer):  # type: ignore[misc]
        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            read.append(checkpoint)

    class OdcBesides(OdcTrainer, Besides): ...

    runs, read = [], list[str | None]()
    for checkpoint in (None, str(folder / "checkpoint-1")):
        trainer = made(True, folder, model(), OdcBesides)
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(logged(trainer))
    return runs, read


def test_a_trainer_of_another_library_reads_what_it_has_saved_besides(ranks, tmp_path) -> None:
    for (whole, resumed), read in ranks(2).run(runs_with_more, tmp_path, timeout=500):
        assert max(differences(resumed, whole)) < 1e-4, (resumed, whole)
        assert read == [str(tmp_path / "checkpoint-1")]


def runs_of_fsdp(rank: int, world: int, folder: Path) -> list[Logged]:
    """Logged steps of a run and of the one resumed after its first, with moments that accelerate saved as FSDP2's."""
    as_torchrun(rank, world)
    from accelerate.utils.fsdp_utils import save_fsdp_optimizer
    from torch.distributed.fsdp import StateDictType
    from transformers import TrainerCallback

    class Saved(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **given: Any) -> None:
            checkpoint = folder / f"checkpoint-{state.global_step}"
            one = SimpleNamespace(offload_to_cpu=True, rank0_only=True)
            whole = {"state_dict_type": StateDictType.FULL_STATE_DICT, "state_dict_config": one}
            plugin = SimpleNamespace(fsdp_version=2, **whole)
            save_fsdp_optimizer(plugin, trainer.accelerator, optimizer, model, str(checkpoint))
            if rank == 0:
                (checkpoint / "optimizer.pt").unlink()

    runs = []
    for checkpoint in (None, str(folder / "checkpoint-1")):
        trainer = made(True, folder, model())
        trainer.add_callback(Saved())
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(logged(trainer))
    return runs


def test_a_checkpoint_of_the_stock_trainer_under_fsdp_is_resumed_with_its_moments(ranks, tmp_path) -> None:
    for whole, resumed in ranks(2).run(runs_of_fsdp, tmp_path, timeout=500):
        assert max(differences(resumed, whole)) < 1e-4, (resumed, whole)


def grown(rank: int, world: int, folder: Path) -> str:
    """The error of a checkpoint without a module that the model has by now."""
    as_torchrun(rank, world)
    made(True, folder, model(), max_steps=1).train()
    trainer = made(True, folder, changed())
    with pytest.raises(ConfigError) as refusal:
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    dist.barrier()
    if rank == 0:
        file = folder / "checkpoint-1" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    dist.barrier()
    with pytest.raises(ConfigError, match="checkpoint-1 cannot be read"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    return str(refusal.value)


def test_weights_that_a_checkpoint_does_not_hold_are_named_on_every_rank(ranks, tmp_path) -> None:
    for message in ranks(2).run(grown, tmp_path, timeout=500):
        assert "no weights of the model's shape for added.weight, model.layers.0.mlp.down_proj.weight" in message


def test_trained_fp32_weights_beside_frozen_bf16_ones_are_read_to_the_bit(tmp_path: Path) -> None:
    """The checkpoint's config has the dtype of the first weight, to which transformers rounds the others."""
    from odc.integrations.transformers_checkpoints import weights_for

    net = model().to(torch.bfloat16)
    net.model.layers.float()
    with torch.no_grad():
        for parameter in net.model.layers.parameters():
            parameter.add_(1e-4)
    net.save_pretrained(tmp_path)
    found = weights_for(net, type(net), str(tmp_path))
    assert found.keys() == net.state_dict().keys()
    assert not [name for name, value in net.state_dict().items() if not torch.equal(found[name], value.float())]


def test_a_model_whose_class_takes_more_than_a_config_is_read(tmp_path: Path) -> None:
    from transformers import Qwen2ForCausalLM

    from odc.integrations.transformers_checkpoints import weights_for

    class Labelled(Qwen2ForCausalLM):
        def __init__(self, config: Any, labels: int) -> None:
            super().__init__(config)
            self.score = torch.nn.Linear(32, labels)
            self.post_init()

    net = Labelled(model().config, 3)
    net.save_pretrained(tmp_path)
    found = weights_for(net, Labelled, str(tmp_path))
    assert not [name for name, value in net.state_dict().items() if not torch.equal(found[name], value)]
    with pytest.raises(ConfigError, match=r"for score\.bias, score\.weight; Labelled could not read it: .*labels"):
        weights_for(Labelled(model().config, 4), Labelled, str(tmp_path))


def adapted(base: Path, seed: int, case: str) -> Any:
    """A model with adapters whose new weights are other ones for each seed."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2ForCausalLM

    net: Any = Qwen2ForCausalLM.from_pretrained(base)
    torch.manual_seed(seed)
    if case == "a module with a buffer":
        net.lm_head.register_buffer("seen", torch.zeros(()))
        return get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    net.resize_token_embeddings(64, mean_resizing=False)
    net = get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="first")
    net.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"]))
    net.set_adapter("second")
    net.get_input_embeddings().requires_grad_(True)
    return net


def runs_of_adapted(rank: int, world: int, folder: Path, case: str) -> list[Logged]:
    """Logged steps of a run and of the one resumed after its first step, from new weights of another seed."""
    as_torchrun(rank, world)
    runs = []
    for seed, checkpoint in enumerate((None, str(folder / "checkpoint-1"))):
        trainer = made(True, folder, adapted(folder / "base", seed, case))
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(logged(trainer))
    return runs


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft: make test-integrations")
@pytest.mark.parametrize("case", ["two adapters and a grown vocabulary", "a module with a buffer"])
def test_adapters_and_what_is_saved_beside_them_are_resumed(ranks, tmp_path, case: str) -> None:
    model().save_pretrained(tmp_path / "base")
    whole, resumed = ranks(2).run(runs_of_adapted, tmp_path, case, timeout=500)[0]
    assert len(whole) == 3 and max(differences(resumed, whole)) < 1e-5, (resumed, whole)
