"""`OdcTrainer(max_tokens=..., split=True)` on two CPU ranks: equal to whole samples, or refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.ranks import RanksFailed
from support.trainers import Logged, arguments, as_torchrun, differences, mixture, model, padded, samples, stepped

from odc import Settings
from odc.errors import ConfigError
from odc.experiments.data.bpe import ByteTokenizer

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make test-integrations",
)
LONG = [60, 22, 22, 22] * 4
CHANGES: dict[str, Any] = {"gradient_accumulation_steps": 1, "train_sampling_strategy": "sequential", "max_steps": 4}


def run(
    rank: int, world: int, folder: Path, changes: dict[str, Any], options: dict[str, Any], positions: bool = False
) -> tuple[Logged, list[int]]:
    """Of steps of four samples."""
    as_torchrun(rank, world)
    rows: list[Any] = samples(LONG)
    if positions:
        rows = [row | {"position_ids": [*range(len(row["input_ids"]))]} for row in rows]
    return stepped(folder, CHANGES | changes, rows, collate=with_positions if positions else padded, **options)


def with_positions(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    found = padded(rows)
    positions = torch.zeros_like(found["input_ids"])
    for i, row in enumerate(rows):
        positions[i, : len(row["position_ids"])] = torch.tensor(row["position_ids"])
    return found | {"position_ids": positions}


def test_long_samples_are_split_over_ranks(ranks, tmp_path) -> None:
    """Samples of 60 tokens under a cap of 40: each rank runs a piece of each."""
    plain = ranks(2).run(run, tmp_path / "plain", {}, {}, timeout=500)
    with pytest.raises(RanksFailed, match="sample 0 has 60 tokens, more than max_tokens=40\n"):
        ranks(2).run(run, tmp_path / "refused", {}, {"max_tokens": 40}, timeout=500)
    split = ranks(2).run(run, tmp_path / "split", {}, {"max_tokens": 40, "split": True}, timeout=500)
    assert max(differences(split[0][0], plain[0][0])) < 1e-4, "the same samples a step, each counted once"
    assert all(sum(step) > 4 for step in zip(split[0][1], split[1][1], strict=True)), split
    counted = ranks(2).run(run, tmp_path / "split", {}, {"max_tokens": 40, "split": True}, True, timeout=500)
    assert max(differences(counted[0][0], plain[0][0])) < 1e-4, "positions that count each row's tokens change nothing"


def test_in_bf16_losses_of_split_samples_are_those_of_whole_ones(ranks, tmp_path) -> None:
    plain = ranks(2).run(run, tmp_path / "plain", {"bf16": True}, {}, timeout=500)
    split = ranks(2).run(run, tmp_path / "split", {"bf16": True}, {"max_tokens": 40, "split": True}, timeout=500)
    loss, norm = differences(split[0][0], plain[0][0])
    assert loss < 2e-3 and norm < 3e-2, (split, plain)
    assert all(sum(step) > 4 for step in zip(split[0][1], split[1][1], strict=True)), split


def moved(rank: int, world: int, folder: Path) -> list[bool]:
    """Of each piece, whether it is made of tensors that the Trainer has moved to its device, as the model's are."""
    from odc.integrations import transformers

    as_torchrun(rank, world)
    there: dict[int, torch.Tensor] = {}

    class Moving(transformers.OdcTrainer):
        def _prepare_input(self, data: Any) -> Any:
            if not isinstance(data, torch.Tensor):
                return super()._prepare_input(data)
            copy = data.clone()  # as `to` would, for a GPU
            return there.setdefault(id(copy), copy)

    def arguments_of(piece: Any, row: dict[str, torch.Tensor]) -> dict[str, Any]:
        found.append(all(id(one) in there for one in row.values()))
        return made(piece, row)

    found, made = list[bool](), transformers.arguments_of
    options: dict[str, Any] = {"train_dataset": samples(LONG), "data_collator": padded, "max_tokens": 40}
    with mock.patch.object(transformers, "arguments_of", arguments_of):
        Moving(model=model(), args=arguments(folder, **CHANGES), split=True, **options).train()
    return found


def test_pieces_are_made_of_what_has_moved_to_the_device(ranks, tmp_path) -> None:
    for found in ranks(2).run(moved, tmp_path, timeout=500):
        assert found and all(found)


def patience(rank: int, world: int, folder: Path) -> float:
    """How long pieces wait for each other, in seconds."""
    as_torchrun(rank, world)
    from odc.integrations import transformers

    options: dict[str, Any] = {"train_dataset": samples(LONG), "data_collator": padded, "max_tokens": 40, "split": True}
    args, settings = arguments(folder, **CHANGES), Settings(timeout_s=123.0)
    trainer = transformers.OdcTrainer(model=model(), args=args, settings=settings, **options)
    with mock.patch.object(transformers, "Splitter") as made:
        trainer.get_train_dataloader()
    return float(made.call_args.kwargs["timeout_s"])


def test_pieces_wait_as_long_as_the_settings_say(ranks, tmp_path) -> None:
    assert ranks(2).run(patience, tmp_path, timeout=500) == [123.0, 123.0]


def seed_oss() -> Any:
    """A model that drops by a function, not by a module."""
    from transformers import SeedOssConfig, SeedOssForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    return SeedOssForCausalLM(
        SeedOssConfig(vocab_size=60, num_key_value_heads=1, attention_dropout=0.0, residual_dropout=0.1, **sizes)
    )


def dropping() -> Any:
    net = model()
    net.model.layers[0].mlp.act_fn = torch.nn.Sequential(net.model.layers[0].mlp.act_fn, torch.nn.Dropout(0.25))
    return net.eval()  # as it comes from `from_pretrained`


def refused(
    rank: int,
    world: int,
    folder: Path,
    net: Callable[[], Any],
    changes: dict[str, Any],
    options: dict[str, Any],
    own: bool,
) -> str:
    as_torchrun(rank, world)
    from odc.integrations.transformers import OdcTrainer

    class Own(OdcTrainer):
        loss_is_scaled_for_ga = True

        def compute_loss(self, *args: Any, **given: Any) -> Any:
            return super().compute_loss(*args, **given)

    args = arguments(folder, **(CHANGES | changes))
    with pytest.raises(ConfigError) as refusal:
        (Own if own else OdcTrainer)(model=net(), args=args, train_dataset=samples(), split=True, **options)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("net", "changes", "options", "own", "message"),
    [
        (model, {}, {}, False, "split=True needs max_tokens"),
        (model, {"label_smoothing_factor": 0.1}, {"max_tokens": 64}, False, "split=True with label_smoothing_factor"),
        (model, {}, {"max_tokens": 64, "compute_loss_func": max}, False, "split=True with compute_loss_func"),
        (model, {}, {"max_tokens": 64}, True, "split=True with compute_loss of Own"),
        (model, {"neftune_noise_alpha": 5.0}, {"max_tokens": 64}, False, "split=True with neftune_noise_alpha"),
        (mixture, {}, {"max_tokens": 64}, False, "router_aux_loss_coef=0.0"),
        (seed_oss, {}, {"max_tokens": 64}, False, "split=True with dropout (residual_dropout=0.1)"),
        (dropping, {}, {"max_tokens": 64}, False, "split=True with dropout (model.layers.0.mlp.act_fn.1=0.25)"),
    ],
)
def test_what_cannot_be_split_is_refused_when_the_trainer_is_made(
    ranks, tmp_path, net, changes, options, own, message: str
) -> None:
    assert message in ranks(2).run(refused, tmp_path, net, changes, options, own)[0]


def packing(rank: int, world: int, folder: Path, changes: dict[str, Any]) -> str:
    as_torchrun(rank, world)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from odc.integrations.transformers import OdcTrainer

    class OdcSFTTrainer(OdcTrainer, SFTTrainer): ...

    folder = folder / str(rank)
    ByteTokenizer().save(folder)
    with pytest.raises(ConfigError) as refusal:
        OdcSFTTrainer(
            model=model(ByteTokenizer.vocab_size),
            args=arguments(folder, SFTConfig, **(CHANGES | changes)),
            train_dataset=Dataset.from_list(samples()),
            processing_class=AutoTokenizer.from_pretrained(folder),
            max_tokens=64,
            split=True,
        )
    return str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": True, "max_length": 64}, "with packing:"),
        ({"padding_free": True, "max_length": None}, "padding_free"),
    ],
)
def test_packing_is_refused_by_its_name(ranks, tmp_path, changes, message: str) -> None:
    pytest.importorskip("trl", reason="needs trl: make test-integrations")
    assert message in ranks(2).run(packing, tmp_path, changes, timeout=500)[0]


def documents(rank: int, world: int, folder: Path, where: str) -> tuple[str, int]:
    """The refusal of rows that are two documents each by their own positions or the collator's; forwards."""
    as_torchrun(rank, world)
    from odc.integrations.transformers import OdcTrainer

    def positions(length: int) -> list[int]:
        return [*range(20), *range(length - 20)]

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return with_positions([row | {"position_ids": positions(len(row["input_ids"]))} for row in rows])

    rows: list[Any] = samples(LONG)
    if where == "rows":
        rows[5:] = [row | {"position_ids": positions(len(row["input_ids"]))} for row in rows[5:]]
    trainer = OdcTrainer(
        model=model(),
        args=arguments(folder, **CHANGES),
        train_dataset=rows,
        data_collator=collate if where == "collator" else padded,
        max_tokens=40,
        split=True,
    )
    runs: list[int] = []
    trainer.model.register_forward_pre_hook(lambda *unused: runs.append(1))
    with pytest.raises(ConfigError) as refusal:
        trainer.train()
    return str(refusal.value), len(runs)


@pytest.mark.parametrize(("where", "row"), [("rows", "row 5 of the dataset"), ("collator", "a row of 60 tokens")])
def test_rows_of_several_documents_are_refused_on_all_ranks_before_any_forward(ranks, tmp_path, where, row) -> None:
    for message, forwards in ranks(2).run(documents, tmp_path, where, timeout=500):
        assert f"the position_ids of {row}" in message and "make each document a row" in message
        assert forwards == 0


@pytest.mark.parametrize(
    ("positions", "accepted"),
    [
        ([0, 1, 2, 3, 0, 0], True),  # those of padding have no meaning
        ([0, 1, 0, 1, 0, 0], False),
        ([1, 2, 3, 4, 0, 0], False),
    ],
)
def test_positions_of_a_collated_row_must_count_its_tokens(positions: list[int], accepted: bool) -> None:
    from odc.integrations.transformers_pieces import row_of

    row = padded([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [1] * 6}])
    row = {name: one[:1] for name, one in row.items()} | {"position_ids": torch.tensor([positions])}
    if accepted:
        ids, labels = row_of(row, 4)
        assert ids.tolist() == labels.tolist() == [5, 6, 7, 8]
    else:
        with pytest.raises(ConfigError, match="do not count its tokens from 0"):
            row_of(row, 4)


@pytest.mark.parametrize("left", [False, True])
def test_padding_of_a_split_sample_adds_no_target(left: bool) -> None:
    """Behind padding the first token has a label to the left of which something stands."""
    from odc.balance import lb_split
    from odc.integrations.transformers_pieces import SplitSamples

    plan = lb_split([40, 2], 2, 24, floor=8)
    row = {name: one[:1] for name, one in padded([{"input_ids": [5] * 40}, {"input_ids": [1] * 48}]).items()}
    if left:
        row = {name: one.roll(8, 1) for name, one in row.items()}
    reported = [SplitSamples(plan, {0: row}).counted(rank) for rank in (0, 1)]
    (batch,) = reported[0] + reported[1]
    assert int((batch["labels"][:, 1:] != -100).sum()) == 39 and batch["input_ids"].shape == (1, 40)


def test_a_row_without_labels_is_refused() -> None:
    from odc.integrations.transformers_pieces import row_of

    row = padded([{"input_ids": [5, 6, 7, 8]}])
    del row["labels"]
    with pytest.raises(ConfigError, match="needs labels from the collator"):
        row_of(row, 4)
