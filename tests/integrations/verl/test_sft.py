"""verl's stock SFT trainer with strategy odc against fsdp2, on two CPU ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.verl import fit, needs_verl, save_chats, save_tiny_model

pytestmark = needs_verl

ODC = {"engine.strategy": "odc", "engine._target_": "odc.integrations.verl.config.OdcEngineConfig"}
FSDP2 = {"engine.strategy": "fsdp2"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sft")
    save_tiny_model(folder / "model")
    save_chats(folder / "train.parquet", samples=32)
    return folder / "model", folder / "train.parquet"


def curve(logged: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(one["train/loss"], one["train/grad_norm"]) for one in logged if "train/loss" in one]


@pytest.mark.parametrize("rebalance", [False, True])
def test_the_loss_curve_is_that_of_fsdp2(ranks, inputs, tmp_path, rebalance) -> None:
    validation = {"data.val_files": inputs[1], "trainer.test_freq": 4}
    theirs = ranks(2).run(fit, FSDP2 | validation, *inputs, tmp_path / "fsdp2")
    changes = ODC | validation | {"+engine.odc.rebalance": rebalance}
    ours = ranks(2).run(fit, changes, *inputs, tmp_path / "odc")
    assert len(curve(ours[0][0])) == 8
    for ours_at, theirs_at in zip(curve(ours[0][0]), curve(theirs[0][0]), strict=True):
        assert ours_at == pytest.approx(theirs_at, rel=1e-4)
    losses = [[one["val/loss"] for one in outcome[0][0] if "val/loss" in one] for outcome in (ours, theirs)]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert theirs[0][1] == theirs[1][1]
    if not rebalance:
        assert ours[0][1] != ours[1][1] and len(ours[0][1]) == 8


@pytest.mark.parametrize("saved", [ODC, FSDP2], ids=["odc", "fsdp2"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(ranks, inputs, tmp_path, saved) -> None:
    """Also from a checkpoint of fsdp2."""
    whole = ranks(2).run(fit, saved | {"trainer.save_freq": 3}, *inputs, tmp_path / "whole")[0][0]
    resume = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": tmp_path / "whole" / "global_step_3"}
    rest = ranks(2).run(fit, ODC | resume, *inputs, tmp_path / "rest")[0][0]
    assert [one["step"] for one in rest] == [4, 5, 6, 7, 8]
    for resumed, once in zip(curve(rest), curve(whole)[3:], strict=True):
        assert resumed == pytest.approx(once, rel=1e-4)


def test_long_chats_in_pieces_train_to_the_same_curve(ranks, inputs, tmp_path) -> None:
    whole = ranks(2).run(fit, ODC, *inputs, tmp_path / "whole")
    split = ODC | {"+engine.odc.split": True, "data.max_token_len_per_gpu": 55}  # the longest chat has more than 100
    pieces = ranks(2).run(fit, split, *inputs, tmp_path / "pieces")
    for one, other in zip(curve(pieces[0][0]), curve(whole[0][0]), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
