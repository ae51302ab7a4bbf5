"""Low-rank adapters by peft: put into the model before it is sharded, and written as an adapter or merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from odc.errors import ConfigError, install
from odc.experiments.config import JobConfig

ALL_LINEAR = "all-linear"
_ADAPTER = "default"


def add_adapters(model: Any, config: JobConfig) -> Any:
    """Gives a whole model the job's adapters, the same on every rank, and freezes everything else; returns the model.

    The model keeps its class and forward. Raises ConfigError without peft, or where no module has such a name.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"lora needs peft: {install('lora')}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            return inject_adapter_in_model(_lora_config(config), model, adapter_name=_ADAPTER)
        except ValueError as error:
            raise ConfigError(f"lora_targets: {error}") from error


def write_adapter(folder: Path, config: JobConfig, weights: dict[str, Any]) -> None:
    """Writes the adapter among the `weights` of the whole model for `PeftModel.from_pretrained`; makes the folder."""
    from safetensors.torch import save_file

    name = f".{_ADAPTER}"
    own = {
        f"base_model.model.{key.replace(name, '')}": value.contiguous()
        for key, value in weights.items()
        if ".lora_" in key
    }
    folder.mkdir(parents=True)
    save_file(own, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = _lora_config(config)
    described.base_model_name_or_path = str(Path(config.model).resolve())
    described.inference_mode = True
    described.save_pretrained(str(folder))


def merged(empty: Any, config: JobConfig, weights: dict[str, Any]) -> dict[str, Any]:
    """The weights with their adapters added in, named as those of `empty`, a model on the meta device."""
    from peft.tuners.lora import LoraModel

    tuner = LoraModel(empty, _lora_config(config), _ADAPTER)
    tuner.model.load_state_dict(weights, strict=False, assign=True)
    return dict(tuner.merge_and_unload().state_dict())


def _lora_config(config: JobConfig) -> Any:
    from peft import LoraConfig

    names = [name.strip() for name in config.lora_targets.split(",")]
    return LoraConfig(
        r=config.lora,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=ALL_LINEAR if names == [ALL_LINEAR] else names,
        task_type="CAUSAL_LM",
    )
