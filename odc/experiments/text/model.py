"""The model to train: a Hugging Face causal LM, from a checkpoint's weights or from a config and a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from odc.errors import ConfigError, install
from odc.experiments.text.attention import register

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def shipped_config(name: str) -> Path:
    """Path of a config that comes with odc; ConfigError listing them otherwise."""
    folder = Path(__file__).parent / "configs"
    path = folder / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.json")))
        raise ConfigError(f"model: {name} is no file or folder, and no shipped config: {known}")
    return path


def build_model(source: Path, *, vocab_size: int | None = None, dtype: torch.dtype, seed: int = 0) -> Any:
    """A transformers causal LM in train mode, whole in memory, whose attention stays inside documents. Local.

    `source` is a checkpoint folder (config.json and safetensors), a folder with config.json alone, or a JSON file.
    Random weights come from `seed`, drawn in fp32 and rounded; the global random state stays. The model has
    `vocab_size` ids without weights, and at least as many with. Raises ConfigError if `source` is neither, names an
    unknown or a multimodal architecture or has too small a vocabulary, or if `transformers` is missing.
    """
    path, weights = _config_path(source)
    config = _config(path)
    if weights:
        if vocab_size is not None and config.vocab_size < vocab_size:
            raise ConfigError(f"model: {source} has {config.vocab_size} ids, the data has {vocab_size}")
        return _pretrained(source, dtype)
    if vocab_size is not None:
        config.vocab_size = vocab_size
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if isinstance(getattr(config, name, None), int) and getattr(config, name) >= vocab_size:
                setattr(config, name, None)
    return _random(config, path, dtype, seed)


def empty_model(source: Path) -> Any:
    """The model of `source` in train mode on the meta device, for checks; ConfigError as in `build_model`."""
    path, _ = _config_path(source)
    config = _config(path)
    with torch.device("meta"):
        return _random(config, path, torch.float32, 0)


def causal_config(source: Path) -> Any:
    """The config of `source` as transformers' own object; ConfigError as in `build_model`."""
    return _config(_config_path(source)[0])


def config_of(source: Path) -> dict[str, Any]:
    """The parsed config of `source`, for cost models; ConfigError as in `build_model`. Does not load transformers."""
    return _parsed(_config_path(source)[0])


def has_weights(source: Path) -> bool:
    """Whether `build_model` loads weights from `source`; ConfigError as there."""
    return _config_path(source)[1]


def _config_path(source: Path) -> tuple[Path, bool]:
    """The config file, and whether weights lie beside it."""
    if source.is_file():
        return source, False
    path = source / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model: {source} is neither a JSON config nor a folder with config.json "
            f"(and, for a checkpoint, {_WEIGHTS[0]})"
        )
    if any((source / name).is_file() for name in _WEIGHTS):
        return path, True
    stray = sorted(p.name for p in source.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    if stray:
        raise ConfigError(f"model: {source} holds {stray[0]} but no {_WEIGHTS[0]} or {_WEIGHTS[1]}")
    return path, False


def _parsed(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"model: {path} is not a JSON config: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ConfigError(f"model: {path} names no 'model_type'")
    return fields


def _config(path: Path) -> Any:
    _parsed(path)
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(f"building a model needs transformers: {install('train')}") from error
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        text = config.get_text_config()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"model: {path} is not a config that transformers knows: {error}") from error
    if text is not config:
        raise ConfigError(
            f"model: {path} is of a multimodal model ({config.model_type}); save its language model, which alone is "
            "trained, in a folder of its own, as docs/finetune.md shows"
        )
    return config


def _random(config: Any, path: Path, dtype: torch.dtype, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=register(), dtype=torch.float32)
    except ValueError as error:
        raise ConfigError(f"model: {path} is not a causal language model: {error}") from error
    except (KeyError, AttributeError, TypeError) as error:  # of a model that has only attentions of its own
        raise ConfigError(
            f"model: {config.model_type} models cannot be built with attention per document: "
            f"{type(error).__name__}: {error}"
        ) from error
    for parameter in model.parameters():  # buffers (rotary frequencies) keep fp32, as in a loaded checkpoint
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.train()


def _pretrained(source: Path, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(source), attn_implementation=register(), dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        raise ConfigError(f"model: the checkpoint {source} cannot be loaded: {error}") from error
    return model.train()
