"""The three submodules of a multimodal model, each a root of its own for `fully_shard`.

The blocks are transformers' (Qwen2-VL's vision tower with its merging connector, Whisper's encoder layers, Qwen2).
Whisper's own forward insists on 30 seconds and does not mask padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from odc.experiments.text.attention import register
from odc.experiments.text.loss import token_loss_sum


class VisionTower(nn.Module):
    """ViT over packed patches of images of any size, attention inside each image, and the connector.

    `config` is transformers' `Qwen2VLVisionConfig`; its `hidden_size` is the language model's width.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        config._attn_implementation = "sdpa"
        self.tower = Qwen2VisionTransformerPretrainedModel(config)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.tower.blocks)

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """Patches [P, 3 * patch * patch] of images with `grids` int64 [images, 2] (rows, columns), in merge order.

        Returns [P / merge^2, language width], image after image.
        """
        once = torch.ones(len(grids), 1, dtype=torch.int64)  # frames of each: these are no videos
        features: Tensor = self.tower(patches, grid_thw=torch.cat([once, grids], dim=1)).pooler_output
        return features


class AudioTower(nn.Module):
    """Whisper's encoder over a padded batch of clips, padding masked everywhere, and the connector.

    `config` is transformers' `WhisperConfig`; the connector joins `downsample` positions into a token of `width`.
    """

    def __init__(self, config: Any, width: int, downsample: int) -> None:
        super().__init__()
        from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer, sinusoids

        config._attn_implementation = "sdpa"
        self.downsample = downsample
        self.conv1 = nn.Conv1d(config.num_mel_bins, config.d_model, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(config.d_model, config.d_model, kernel_size=3, stride=2, padding=1)
        self.register_buffer("positions", sinusoids(config.max_source_positions, config.d_model), persistent=False)
        self.layers = nn.ModuleList([WhisperEncoderLayer(config) for _ in range(config.encoder_layers)])
        self.layer_norm = nn.LayerNorm(config.d_model)
        joined = config.d_model * downsample
        self.connector = nn.Sequential(nn.Linear(joined, joined), nn.GELU(), nn.Linear(joined, width))

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, mel: Tensor, frames: Sequence[int]) -> Tensor:
        """Spectrograms [clips, longest, bins], zero after each clip's own `frames`.

        Returns the tokens of all clips without padding, [sum of tokens, language width], clip after clip.
        """
        lengths = torch.tensor(frames)
        hidden = gelu(self.conv1(mel.transpose(1, 2)))
        # A convolution's bias makes padding nonzero, and the next one would carry that into the last real position.
        hidden = hidden * _real(lengths, mel.shape[1])[:, None]
        hidden = gelu(self.conv2(hidden)).transpose(1, 2)
        lengths = (lengths + 1) // 2
        real = _real(lengths, hidden.shape[1])
        hidden = hidden + cast(Tensor, self.positions)[: hidden.shape[1]]
        mask = None if bool(real.all()) else real[:, None, None].expand(-1, 1, hidden.shape[1], -1)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        hidden = self.layer_norm(hidden) * real[..., None]
        return self._connect(hidden, lengths)

    def _connect(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Joins `downsample` positions (zeros after the last) and drops what is only padding."""
        clips, longest, width = hidden.shape
        short = -longest % self.downsample
        joined = nn.functional.pad(hidden, (0, 0, 0, short)).reshape(clips, -1, width * self.downsample)
        tokens = -(-lengths // self.downsample)
        features: Tensor = self.connector(joined[_real(tokens, joined.shape[1])])
        return features


class LanguageModel(nn.Module):
    """A causal LM, `config` is transformers', over packed sequences with media features in their places."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.lm = AutoModelForCausalLM.from_config(config, attn_implementation=register(), dtype=torch.float32)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.lm.model.layers)

    def forward(self, ids: Tensor, features: Tensor, order: Tensor, labels: Tensor, lengths: Sequence[int]) -> Tensor:
        """Summed cross-entropy over the labels of packed examples, a scalar in fp32.

        `ids` are int64 [text tokens], `features` [media tokens, width]; `order`, int64 [T], has for each position the
        row of `ids` followed by `features` that stands there. `labels` int64 [T] are shifted; `lengths` add up to T.
        """
        embedded = self.lm.get_input_embeddings()(ids)
        embedded = torch.cat([embedded, features.to(embedded.dtype)]).index_select(0, order)
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(length) for length in lengths])
        hidden = self.lm.model(
            inputs_embeds=embedded[None], position_ids=positions[None], cu_seq_lens_q=starts, use_cache=False
        ).last_hidden_state
        return token_loss_sum(hidden, self.lm.get_output_embeddings().weight, labels[None])


def _real(lengths: Tensor, longest: int) -> Tensor:
    """Bool [clips, longest]: which positions are no padding."""
    return torch.arange(longest)[None] < lengths[:, None]
