"""A multimodal model from one JSON file: configurations of its three towers and the sequence lengths they produce."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from odc.errors import ConfigError, install
from odc.experiments.data.bpe import ByteTokenizer
from odc.experiments.multimodal.towers import AudioTower, LanguageModel, VisionTower

_PARTS = ("vision_config", "audio_config", "text_config")
#: What FLOPs are counted by (`phase_costs`), also where transformers has a default.
_COUNTED = {
    "vision_config": ("embed_dim", "depth", "mlp_ratio"),
    "audio_config": ("d_model", "encoder_layers", "encoder_ffn_dim"),
}


@dataclass(frozen=True)
class TowerGeometry:
    """What decides lengths, and the language model's `width`, which is that of features.

    Images of at most `max_pixels` are cut into patches of `patch` pixels; blocks of `merge` a side become one token.
    Clips have `bins` mel bins and at most `most_positions` (50 a second), of which `downsample` become one token.
    """

    patch: int
    merge: int
    max_pixels: int
    bins: int
    downsample: int
    most_positions: int
    width: int

    def audio_positions(self, frames: int) -> int:
        """Positions of a clip inside the encoder: its convolutions halve the frames."""
        return (frames + 1) // 2

    def audio_tokens(self, positions: int) -> int:
        return -(-positions // self.downsample)


@dataclass(frozen=True)
class ModelConfig:
    """A parsed model file, `fields` as in odc/experiments/multimodal/configs/mm-demo.json."""

    fields: Mapping[str, Any]

    @property
    def geometry(self) -> TowerGeometry:
        vision, audio = self.fields["vision_config"], self.fields["audio_config"]
        return TowerGeometry(
            patch=vision["patch_size"],
            merge=vision["spatial_merge_size"],
            max_pixels=self.fields["max_pixels"],
            bins=audio["num_mel_bins"],
            downsample=self.fields["audio_downsample"],
            most_positions=audio["max_source_positions"],
            width=self.fields["text_config"]["hidden_size"],
        )


def load_config(source: str) -> ModelConfig:
    """The model file `source`, or the shipped one of that name; ConfigError naming what is wrong with it."""
    path = Path(source)
    if not path.is_file():
        shipped = Path(__file__).parent / "configs"
        path = shipped / f"{source}.json"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in shipped.glob("*.json")))
            raise ConfigError(
                f"model: there is no file {source} and no shipped multimodal config of that name: {known}"
            )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in (*_PARTS, "audio_downsample", "max_pixels") if name not in fields]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model: {path} is not a JSON object: {error}") from error
    if missing:
        raise ConfigError(f"model: {path} lacks {', '.join(missing)}")
    try:
        config = ModelConfig(fields)
        _ = config.geometry, [fields[part][name] for part, names in _COUNTED.items() for name in names]
    except KeyError as error:
        raise ConfigError(f"model: {path} lacks {error}") from error
    if fields["vision_config"].get("temporal_patch_size") != 1:
        raise ConfigError(f"model: {path}: vision_config needs temporal_patch_size 1; there are no videos")
    return config


def build_towers(config: ModelConfig, seed: int) -> dict[str, nn.Module]:
    """The submodules `image`, `audio` and `llm`, in train mode, fp32, the same bits from the same seed on every rank.

    Local; the global random state is left as it was. Raises ConfigError when transformers is missing or refuses a part.
    """
    try:
        from transformers import Qwen2Config, WhisperConfig
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    except ImportError as error:
        raise ConfigError(f"building a model needs transformers: {install('multimodal')}") from error
    fields = config.fields
    width = fields["text_config"]["hidden_size"]
    vocab = {"vocab_size": ByteTokenizer.vocab_size, "bos_token_id": None, "eos_token_id": None}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            towers: dict[str, nn.Module] = {
                "image": VisionTower(Qwen2VLVisionConfig(**{**fields["vision_config"], "hidden_size": width})),
                "audio": AudioTower(
                    WhisperConfig(**{"dropout": 0.0, **fields["audio_config"]}), width, fields["audio_downsample"]
                ),
                "llm": LanguageModel(Qwen2Config(**{**fields["text_config"], **vocab})),
            }
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model: {error}") from error
    return {name: tower.train() for name, tower in towers.items()}
