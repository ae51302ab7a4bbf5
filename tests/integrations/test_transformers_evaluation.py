"""Forwards without gradients where a Trainer runs them: before training, in callbacks, to choose and to generate."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainers import Logged, arguments, as_torchrun, differences, logged, model, padded, samples
from torch import nn

from odc.errors import ConfigError

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make test-integrations",
)


def made(ours: bool, folder: Path, net: Any, *, rows: Any = None, collate: Any = padded, **changes: Any) -> Any:
    from transformers import Trainer

    from odc.integrations.transformers import OdcTrainer

    data = samples() if rows is None else rows
    given = {"train_dataset": data, "eval_dataset": data[:8], "data_collator": collate}
    more = {"blocks": "Block"} if ours and isinstance(net, Plain) else {}
    return (OdcTrainer if ours else Trainer)(model=net, args=arguments(folder, **changes), **given, **more)


def looked_at(rank: int, world: int, folder: Path) -> list[Logged]:
    """Logged steps and (twice) the loss after them: of a plain run, of some that begin without gradients, of one with
    a forward without gradients between each optimizer step and what clears its gradients.
    """
    from transformers import TrainerCallback

    as_torchrun(rank, world)

    class Look(TrainerCallback):
        def on_optimizer_step(self, *unused: Any, **given: Any) -> None:
            with torch.no_grad():
                trainer.model(**padded(samples()[:2]))

    found = []
    for way in ("plain", "evaluated", "predicted", "generated", "looked at"):
        trainer = made(True, folder, model())
        if way == "evaluated":
            trainer.evaluate()
        elif way == "predicted":
            trainer.predict(samples()[:4])
        elif way == "generated":
            trainer.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)
        elif way == "looked at":
            trainer.add_callback(Look())
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        found.append([*logged(trainer), (loss, loss)])
    return found


def test_forwards_without_gradients_change_no_training(ranks, tmp_path) -> None:
    plain, *others = ranks(2).run(looked_at, tmp_path)[0]
    for other in others:
        assert max(differences(other, plain)) < 1e-6


class Swapping(torch.optim.SGD):
    """As schedule-free optimizers: other weights for evaluation, and a step is refused with those."""

    trains = False

    def _swap(self, trains: bool, factor: float) -> None:
        if self.trains is not trains:
            self.trains = trains
            with torch.no_grad():
                for weight in self.param_groups[0]["params"]:
                    weight.mul_(factor)

    def train(self) -> None:
        self._swap(True, 2.0)

    def eval(self) -> None:
        self._swap(False, 0.5)

    def step(self, closure: Any = None) -> None:
        assert self.trains
        super().step()


def swapped(rank: int, world: int, folder: Path, kind: str) -> tuple[Logged, list[float]]:
    """Two logged steps and the losses of the evaluations after them; in a third step one rank has no sample."""
    from transformers import Trainer

    from odc.integrations.transformers import OdcTrainer

    as_torchrun(rank, world)
    changes = {"gradient_accumulation_steps": 1, "train_sampling_strategy": "sequential"}
    changes |= {"eval_strategy": "steps", "eval_steps": 1}
    given: dict[str, Any] = {"train_dataset": samples()[:9], "eval_dataset": samples()[:8], "data_collator": padded}
    given |= {"args": arguments(folder, **changes), "optimizer_cls_and_kwargs": (Swapping, {"lr": 1e-2})}
    given |= {"max_tokens": 1000} if kind == "planned" else {}
    trainer = (Trainer if kind == "stock" else OdcTrainer)(model=model(), **given)
    trainer.train()
    return logged(trainer)[:2], [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one][:2]


def test_an_optimizer_with_other_weights_for_evaluation(ranks, tmp_path) -> None:
    steps, losses = ranks(2).run(swapped, tmp_path, "stock")[0]
    for kind in ("unplanned", "planned"):
        ours, evaluated = ranks(2).run(swapped, tmp_path, kind)[0]
        assert max(differences(ours, steps)) < 1e-4 and evaluated == pytest.approx(losses, rel=1e-4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.linear(hidden)


class Plain(nn.Module):
    """A module that none of Hugging Face's classes is a base of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.block, self.head = nn.Embedding(60, 16), Block(), nn.Linear(16, 60)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.block(self.table(input_ids)))[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def best(rank: int, world: int, ours: bool, folder: Path, plain: bool) -> tuple[Logged, float, float]:
    """Logged steps of a run whose first evaluation is its best, the loss of that, and of the model after the run."""
    as_torchrun(rank, world)
    changes: dict[str, Any] = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1}
    changes |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = made(ours, folder, Plain() if plain else model(), optim="sgd", **changes)
    trainer.train()
    first = next(one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one)
    return logged(trainer), first, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("plain", [False, True], ids=["of transformers", "plain module"])
def test_the_best_model_is_loaded_after_an_evaluation_that_was_not_saved(ranks, tmp_path, plain: bool) -> None:
    theirs = ranks(2).run(best, False, tmp_path / "ddp", plain)[0]
    for ours in ranks(2).run(best, True, tmp_path / "odc", plain):
        assert max(differences(ours[0], theirs[0])) < 1e-4
        assert ours[1] == pytest.approx(ours[2], rel=1e-6) and ours[1] == pytest.approx(theirs[1], rel=1e-5)


def answers(rank: int, world: int, ours: bool, folder: Path, bf16: bool) -> tuple[Logged, list[float]]:
    """Logged steps of an encoder-decoder, and after each the sum of the tokens that it has generated."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from odc.integrations.transformers import OdcTrainer

    as_torchrun(rank, world)
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    net = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))
    changes: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 6, "bf16": bf16}
    args = arguments(folder, Seq2SeqTrainingArguments, eval_strategy="steps", eval_steps=1, **changes)
    kind = type("OdcSeq2SeqTrainer", (OdcTrainer, Seq2SeqTrainer), {}) if ours else Seq2SeqTrainer
    given = {"train_dataset": samples(), "eval_dataset": samples()[:8], "data_collator": padded}
    trainer = kind(model=net, args=args, **given, compute_metrics=lambda found: {"sum": float(found.predictions.sum())})
    trainer.train()
    return logged(trainer), [one["eval_sum"] for one in trainer.state.log_history if "eval_sum" in one]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_an_encoder_decoder_generates_in_evaluations(ranks, tmp_path, bf16: bool) -> None:
    theirs = ranks(2).run(answers, False, tmp_path / "ddp", bf16)[0]
    ours = ranks(2).run(answers, True, tmp_path / "odc", bf16)[0]
    assert max(differences(ours[0], theirs[0])) < (2e-2 if bf16 else 1e-4)
    assert len(ours[1]) == 3 and (bf16 or ours[1] == theirs[1])


def heard(rank: int, world: int, folder: Path, bf16: bool) -> list[list[int]]:
    """Tokens that a Whisper generates of two windows: its language from a forward, and the encoder run for each."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    from odc.integrations.transformers import prepare

    as_torchrun(rank, world)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 50}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = WhisperConfig(vocab_size=60, num_mel_bins=8, max_target_positions=20, **sizes, **heads, **tokens)
    found = []
    for sharded in (False, True):
        if sharded and bf16:
            from accelerate import Accelerator

            Accelerator(mixed_precision="bf16", cpu=True)
        torch.manual_seed(0)
        net = WhisperForConditionalGeneration(config)
        net.generation_config.is_multilingual, net.generation_config.lang_to_id = True, {"<|en|>": 5, "<|de|>": 6}
        net.generation_config.task_to_id, net.generation_config.no_timestamps_token_id = {"transcribe": 7}, 40
        net.eval()
        if sharded:
            prepare(net)
        sound = torch.randn(1, 8, 100, generator=torch.Generator().manual_seed(1))
        found.append(net.generate(sound, max_new_tokens=4)[0].tolist())
    return found


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_generation_keeps_the_roots_parameters_until_its_end(ranks, tmp_path, bf16: bool) -> None:
    """Whisper asks its own forward for the language, and then runs its encoder, below the root."""
    plain, sharded = ranks(2).run(heard, tmp_path, bf16)[0]
    assert bf16 or plain == sharded


def years(rank: int, world: int, ours: bool, folder: Path) -> float:
    """The loss of a regression in bf16 to numbers that bf16 does not hold."""
    from transformers import Qwen2ForSequenceClassification

    as_torchrun(rank, world)
    config = model().config
    config.num_labels, config.pad_token_id, config.problem_type = 1, 0, "regression"
    torch.manual_seed(0)
    net = Qwen2ForSequenceClassification(config)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return padded(rows) | {"labels": torch.tensor([2021.0 + len(row["input_ids"]) % 4 for row in rows])}

    return made(ours, folder, net, collate=collate, bf16=True).evaluate()["eval_loss"]


def test_labels_are_not_rounded_in_bf16(ranks, tmp_path) -> None:
    theirs = ranks(2).run(years, False, tmp_path / "ddp")[0]
    assert ranks(2).run(years, True, tmp_path / "odc")[0] == pytest.approx(theirs, rel=1e-4)


def of_a_count(rank: int, world: int, ours: bool, folder: Path) -> float:
    """The mean loss in bf16 of 257 targets, which bf16 takes for 256."""
    as_torchrun(rank, world)
    changes: dict[str, Any] = {"bf16": True, "per_device_eval_batch_size": 1}
    return made(ours, folder, model(), rows=samples([130, 129]), **changes).evaluate()["eval_loss"]


def test_the_count_of_targets_is_not_rounded_in_bf16(ranks, tmp_path) -> None:
    theirs = ranks(2).run(of_a_count, False, tmp_path / "ddp")[0]
    assert ranks(2).run(of_a_count, True, tmp_path / "odc")[0] == pytest.approx(theirs, rel=1e-3)


def tied(rank: int, world: int, ours: bool, folder: Path) -> list[str]:
    """Names in the file of a saved model whose head has the weights of its embedding."""
    from safetensors import safe_open
    from transformers import Qwen2ForCausalLM

    as_torchrun(rank, world)
    config = model().config
    config.tie_word_embeddings = True
    made(ours, folder, Qwen2ForCausalLM(config)).save_model()
    if rank:
        return []
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        return sorted(opened.keys())


def test_tied_weights_are_saved_once(ranks, tmp_path) -> None:
    theirs, ours = (ranks(2).run(tied, way, tmp_path / str(way))[0] for way in (False, True))
    assert ours == theirs and "lm_head.weight" not in ours


def loaded_by(rank: int, world: int, ours: bool, folder: Path) -> tuple[dict[str, str], list[str]]:
    """The class by which a saved model is loaded again, whose code is its own, and the files of code beside it."""
    from transformers import Qwen2ForCausalLM

    as_torchrun(rank, world)

    class Mine(Qwen2ForCausalLM):
        _auto_class = "AutoModelForCausalLM"

    made(ours, folder, Mine(model().config)).save_model()
    if rank:
        return {}, []
    code = [file.name for file in folder.glob("*.py")]
    return json.loads((folder / "config.json").read_text())["auto_map"], code


def test_a_saved_model_of_ones_own_code_is_loaded_by_its_own_class(ranks, tmp_path) -> None:
    theirs, ours = (ranks(2).run(loaded_by, way, tmp_path / str(way))[0] for way in (False, True))
    own = "test_transformers_evaluation"
    assert ours == theirs == ({"AutoModelForCausalLM": f"{own}.Mine"}, [f"{own}.py"])


def again(rank: int, world: int, folder: Path) -> list[str]:
    """The errors of a second trainer for a model, and of a stock optimizer's state of another one."""
    from odc.integrations.transformers import prepare
    from odc.integrations.transformers_checkpoints import WHOLE, load_optimizer

    as_torchrun(rank, world)
    net, errors = model(), []
    optimizer = torch.optim.SGD(prepare(net).parameters(), 0.1, momentum=0.9)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1, momentum=0.9)
    for wrong in (
        lambda: prepare(net),
        lambda: load_optimizer(net, optimizer, other.state_dict(), WHOLE),
    ):
        with pytest.raises(ConfigError) as caught:
            wrong()
        errors.append(str(caught.value))
    return errors


def test_what_cannot_follow_is_refused_by_name(ranks, tmp_path) -> None:
    sharded, moments = ranks(1).run(again, tmp_path)[0]
    assert "is sharded already" in sharded and "other parameters than this one" in moments
