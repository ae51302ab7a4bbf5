"""Every argument of a Trainer is applied, irrelevant or refused; what is refused raises before anything is built."""

from __future__ import annotations

import dataclasses
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from odc.errors import ConfigError
from odc.integrations.transformers_arguments import REFUSED, REFUSED_OF_TRL

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make test-integrations",
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No torchrun: the arguments are refused before a process group is needed."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def arguments(folder: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **changes)


UNPLANNED: dict[str, tuple[Any, str]] = {
    "split_batches": (True, "the plan divides the samples"),
    "dispatch_batches": (True, "each rank loads its own"),
    "gradient_accumulation_steps": (2, "set it to 1"),
    "average_tokens_across_devices": (False, "leave it True"),
    "include_num_input_tokens_seen": ("all", "leave it out"),
    "train_sampling_strategy": ("batch_rebalance", "group_by_length"),
    "model_accepts_loss_kwargs": (False, "a mean over a microbatch"),
    "loss_is_scaled_for_ga": (False, "a mean over a microbatch"),
}


@pytest.mark.parametrize("name", UNPLANNED)
def test_a_plan_of_steps_is_refused_where_ranks_could_not_differ(name: str) -> None:
    from transformers import Trainer

    from odc.integrations.transformers_loss import refuse_unplanned

    fields = {"gradient_accumulation_steps": 1, "average_tokens_across_devices": True}
    fields |= {"include_num_input_tokens_seen": "no", "train_sampling_strategy": "random"}
    loaders = SimpleNamespace(split_batches=False, dispatch_batches=None)
    args = SimpleNamespace(**fields, accelerator_config=loaders)
    trainer = SimpleNamespace(args=args, model_accepts_loss_kwargs=True, compute_loss_func=None)
    trainer.loss_is_scaled_for_ga, trainer.compute_loss = None, Trainer.compute_loss
    refuse_unplanned(trainer, 64)
    value, instead = UNPLANNED[name]
    setattr(next(one for one in (trainer, args, loaders) if hasattr(one, name)), name, value)
    with pytest.raises(ConfigError, match="^odc cannot apply max_tokens=64") as caught:
        refuse_unplanned(trainer, 64)
    assert instead in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "instead"), [*REFUSED.items(), *REFUSED_OF_TRL.items()])
def test_what_is_refused_raises_with_what_to_use(name: str, instead: str, tmp_path: Path) -> None:
    from odc.integrations.transformers import OdcTrainer

    args = arguments(tmp_path / "run")
    setattr(args, name, True)  # some cannot be given without a library or a device that is not there
    with pytest.raises(ConfigError) as caught:
        OdcTrainer(model=mock.NonCallableMock(), args=args)
    assert str(caught.value) == f"odc cannot apply {name}=True: {instead}" and "\n" not in instead
    assert not (tmp_path / "run").exists(), "something was built before"


def test_vllm_is_refused_but_as_a_server(tmp_path: Path) -> None:
    from odc.integrations.transformers_arguments import refuse_arguments

    args = arguments(tmp_path)
    args.use_vllm, args.vllm_mode = True, "server"
    refuse_arguments(args)
    args.vllm_mode = "colocate"
    with pytest.raises(ConfigError, match=r"^odc cannot apply use_vllm=True with vllm_mode='colocate': .*\"server\""):
        refuse_arguments(args)


def test_arguments_as_they_are_given_on_a_command_line_are_refused(tmp_path: Path) -> None:
    from odc.integrations.transformers_arguments import refuse_arguments

    refuse_arguments(arguments(tmp_path))
    with mock.patch.dict(os.environ), pytest.raises(ConfigError, match="fsdp="):
        refuse_arguments(arguments(tmp_path, fsdp="full_shard"))
    with pytest.raises(ConfigError, match=r"optim='adafactor': use one of adamw_torch"):
        refuse_arguments(arguments(tmp_path, optim="adafactor"))
    once = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    with pytest.raises(ConfigError, match="sync_each_batch"):
        refuse_arguments(arguments(tmp_path, accelerator_config=once))


def test_a_newer_field_is_refused_if_its_name_speaks_of_sharding(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from odc.integrations.transformers_arguments import refuse_arguments

    @dataclasses.dataclass
    class Newer(TrainingArguments):
        tensor_parallel_size: int = 0
        log_colours: bool = False

    with mock.patch("transformers.TrainingArguments", Newer):
        refuse_arguments(Newer(output_dir=str(tmp_path), use_cpu=True, log_colours=True))
        with pytest.raises(ConfigError, match="tensor_parallel_size=2: odc does not know this argument"):
            refuse_arguments(Newer(output_dir=str(tmp_path), use_cpu=True, tensor_parallel_size=2))


def test_determinism_and_settings_must_agree(tmp_path: Path) -> None:
    from odc.integrations.transformers_arguments import settings_for
    from odc.settings import Settings

    strict, plain = SimpleNamespace(full_determinism=True), SimpleNamespace(full_determinism=False)
    given = Settings(timeout_s=5)
    assert settings_for(plain, given) is given and settings_for(plain, None) is None
    with pytest.raises(ConfigError, match=r"full_determinism=True: .* settings=odc.Settings\(reproducible=True\)"):
        settings_for(strict, given)


@pytest.mark.parametrize("option", ["model_init", "optimizers"])
def test_what_is_made_before_the_model_is_sharded_is_refused(option: str, tmp_path: Path) -> None:
    from odc.integrations.transformers import OdcTrainer

    value = {"model_init": mock.Mock(), "optimizers": (mock.Mock(), None)}[option]
    with pytest.raises(ConfigError, match=f"odc cannot apply {option}"):
        OdcTrainer(model=mock.NonCallableMock(), args=arguments(tmp_path), **{option: value})


class Given(Exception): ...


@pytest.mark.parametrize("behind", [("reference",), ()], ids=["after another", "second"])
def test_what_is_given_by_position_comes_to_the_trainer_behind(behind: tuple[str, ...], tmp_path: Path) -> None:
    from transformers import Trainer

    from odc.integrations.transformers import OdcTrainer

    class Theirs(Trainer):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            raise Given(given, named)

    class OdcTheirs(OdcTrainer, Theirs): ...

    args = arguments(tmp_path)
    for place, named in (((*behind, args), {}), (behind, {"args": args})):
        with pytest.raises(Given) as caught:
            OdcTheirs("model", *place, train_dataset="rows", **named)
        if behind:
            assert caught.value.args == (("model", *place), {"train_dataset": "rows"} | named)
        else:  # arguments may stand next to the model whatever stands there behind
            assert caught.value.args == ((), {"train_dataset": "rows", "model": "model", "args": args})
    args.fp16 = True
    with pytest.raises(ConfigError, match="fp16"):
        OdcTheirs("model", *behind, args)


def test_an_optimizer_that_is_given_by_position_is_refused_too(tmp_path: Path) -> None:
    from transformers import Trainer

    from odc.integrations.transformers import OdcTrainer

    class Theirs(Trainer):  # type: ignore[misc]
        def __init__(self, model: Any, optimizer: Any, args: Any) -> None:
            self.model_init, self.optimizer = None, optimizer

    class OdcTheirs(OdcTrainer, Theirs): ...

    with pytest.raises(ConfigError, match="model_init or optimizers"):
        OdcTheirs("model", "optimizer", arguments(tmp_path))


def test_parameters_of_the_whole_model_are_refused_in_an_optimizer(tmp_path: Path) -> None:
    from transformers import Trainer

    from odc.integrations.transformers import OdcTrainer

    class Theirs(Trainer):  # type: ignore[misc]
        def __init__(self, model: Any, args: Any, optimizer_cls_and_kwargs: Any) -> None:
            self.model_init, self.optimizer = None, None
            self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs

    class OdcTheirs(OdcTrainer, Theirs): ...

    groups = [{"params": [mock.Mock()], "lr": 0.5}, {"params": [mock.Mock()]}]
    with pytest.raises(ConfigError, match="params in optimizer_cls_and_kwargs: override create_optimizer"):
        OdcTheirs("model", arguments(tmp_path), optimizer_cls_and_kwargs=(mock.Mock(), {"params": groups, "lr": 0.1}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16'"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8'"),
        ({"fsdp_plugin": object()}, "fsdp_plugin"),
        ({"deepspeed_plugin": object()}, "deepspeed_plugin"),
    ],
)
def test_what_the_environment_asks_of_accelerate_is_refused(changes: dict[str, Any], message: str) -> None:
    """`accelerate launch` sets these in the environment; some need devices to be set at all."""
    from odc.integrations.transformers_arguments import AcceleratorOptions

    state = SimpleNamespace(**({"mixed_precision": "no", "dynamo_plugin": None} | changes))
    with (
        mock.patch("accelerate.state.is_initialized", return_value=True),
        mock.patch("accelerate.state.AcceleratorState", return_value=state),
        pytest.raises(ConfigError, match=message),
    ):
        AcceleratorOptions.current()


def test_the_page_names_what_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    refused = page.split("| refused | use instead |")[1].split("\n\n")[0]
    assert [name for name in REFUSED if f"`{name}" not in refused] == []
