"""Trainers and loops under Accelerate whose ranks die: two ranks end with the bits of a job that nothing befell."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import recovering_trainers
from support.recovering import Death, unequal
from support.recovering_trainers import run

from odc.errors import ConfigError
from odc.recovery.state import random_states

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make test-integrations",
)

ROUNDS = {
    "forwards": [Death(1, 2, "second forward"), Death(0, 4, "forward"), Death(1, 6, "save")],
    "elsewhere": [
        *(Death(1, 0, "building"), Death(0, 3, "log"), Death(1, 4, "evaluate"), Death(0, 4, "epoch")),
        *(Death(1, 7, "step"), Death(0, 8, "finish")),
    ],
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Trainer's job, and its folder."""
    folder = tmp_path_factory.mktemp("trainer") / "job"
    return folder, run(folder)


def survived(folder: Path, deaths: list[Death], found: Any, reference: Any) -> None:
    """All deaths have been, and nothing differs, nor what was logged."""
    happened = {path.name for path in (folder / "deaths").iterdir()}
    assert happened == {f"{death.rank}.{death.step}.{death.point}" for death in deaths}
    assert not unequal(found, reference)
    for ours, theirs in zip(found, reference, strict=True):
        assert (ours["history"], ours["loss"]) == (theirs["history"], theirs["loss"])


@pytest.mark.parametrize("deaths", ROUNDS.values(), ids=ROUNDS.keys())
def test_a_trainer_goes_on(deaths: list[Death], undisturbed: tuple[Path, Any], tmp_path: Path) -> None:
    survived(tmp_path, deaths, run(tmp_path, deaths), undisturbed[1])


def test_a_trainer_that_began_at_a_checkpoint_goes_on(undisturbed: tuple[Path, Any], tmp_path: Path) -> None:
    checkpoint = str(undisturbed[0] / "output" / "checkpoint-3")
    deaths = [Death(1, 3, "second forward"), Death(0, 5, "step")]
    found = run(tmp_path, deaths, resume=checkpoint)
    survived(tmp_path, deaths, found, run(tmp_path / "undisturbed", resume=checkpoint))


@pytest.mark.parametrize(
    ("every", "death"),
    [(1, Death(0, 3, "half saved")), (4, Death(1, 3, "step"))],
    ids=["it is half written", "what was kept is older"],
)
def test_a_replacement_reads_no_checkpoint(
    every: int, death: Death, undisturbed: tuple[Path, Any], tmp_path: Path
) -> None:
    """Its program begins at the last one that it finds, as that of a job whose launcher starts all of it again."""
    survived(tmp_path, [death], run(tmp_path, [death], resume="last", every=every), undisturbed[1])
    assert (tmp_path / "output" / "checkpoint-3" / "trainer_state.json").exists()


def test_unequal_microbatches_are_planned_as_before(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    changes["train_sampling_strategy"] = "group_by_length"
    deaths = [Death(1, 2, "forward"), Death(0, 5, "step")]
    found = run(tmp_path, deaths, changes=changes, max_tokens=64)
    survived(tmp_path, deaths, found, run(tmp_path / "undisturbed", changes=changes, max_tokens=64))


def test_a_callback_counts_on(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback

    each_second = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    # The larger the better: the first is the best, and the third the second that is worse.
    options: dict[str, Any] = {"callbacks": [EarlyStoppingCallback(2)]}
    options["changes"] = each_second | {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    found = run(tmp_path, [Death(1, 5, "forward")], **options)
    assert [one["seen"] for one in found] == [6, 6]
    survived(tmp_path, [Death(1, 5, "forward")], found, run(tmp_path / "undisturbed", **options))


def test_an_epoch_that_a_callback_ends_early_is_not_gone_on_with(tmp_path: Path) -> None:
    deaths, options = [Death(1, 3, "forward"), Death(0, 4, "step")], {"made": recovering_trainers.shortening}
    found = run(tmp_path, deaths, **options)
    assert found[0]["history"][-1]["step"] == 6
    survived(tmp_path, deaths, found, run(tmp_path / "undisturbed", **options))


@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl and peft: make test-integrations")
@pytest.mark.parametrize(
    "made", [recovering_trainers.finetuning, recovering_trainers.preferring, recovering_trainers.growing]
)
def test_a_trainer_of_trl_goes_on(made: Callable[..., Any], tmp_path: Path) -> None:
    deaths, options = [Death(1, 3, "second forward"), Death(0, 5, "step")], {"made": made}
    found = run(tmp_path, deaths, **options)
    survived(tmp_path, deaths, found, run(tmp_path / "undisturbed", **options))


def test_a_loop_under_accelerate_goes_on(tmp_path: Path) -> None:
    deaths = [Death(1, 2, "second forward"), Death(0, 4, "forward"), Death(1, 7, "step")]
    found = run(tmp_path, deaths, recovering_trainers.accelerated)
    survived(tmp_path, deaths, found, run(tmp_path / "undisturbed", (), recovering_trainers.accelerated))


REFUSED: dict[str, dict[str, Any]] = {
    "eval_on_start=True": {"eval_on_start": True},
    "train_sampling_strategy='group_by_length'": {"train_sampling_strategy": "group_by_length"},
    "ignore_data_skip=True": {"ignore_data_skip": True},
    "use_seedable_sampler=False": {"accelerator_config": SimpleNamespace(use_seedable_sampler=False)},
    "a dataset without a length": {},
    "log_completions=True": {"log_completions": True},
    "split=True": {},
}


def test_a_vllm_server_is_given_the_weights_that_were_put_back() -> None:
    """TRL sends them if the step is another than that of the last time; the server has those of a step that is lost."""
    from odc.integrations.transformers_recovery import TrainerLoop

    trainer = SimpleNamespace(_last_loaded_step=7, callback_handler=SimpleNamespace(callbacks=[]))
    loop = TrainerLoop(trainer, SimpleNamespace())  # type: ignore[arg-type]
    loop.kept = {"changed": {}, "callbacks": [], "over": False, "random": random_states()}
    loop.put_back()
    assert trainer._last_loaded_step == -1


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_again_is_refused(what: str) -> None:
    from odc.integrations.transformers_recovery import refuse_unrepeatable

    args = {"eval_on_start": False, "ignore_data_skip": False, "train_sampling_strategy": "random"}
    args |= {"accelerator_config": SimpleNamespace(use_seedable_sampler=True)} | REFUSED[what]
    trainer = SimpleNamespace(args=SimpleNamespace(**args), train_dataset=[])
    if what == "a dataset without a length":
        trainer.train_dataset = iter([])
    with pytest.raises(ConfigError, match=f"cannot apply recovery with {what}: "):
        refuse_unrepeatable(trainer, None, what == "split=True")
