"""Examples as tensors: what a rank decodes of a minibatch, what a tower takes of it, and the labels.

One forward takes all of a rank's items of a phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from odc.errors import DataError
from odc.experiments.data.dataset import MinibatchSampler
from odc.experiments.data.packing import IGNORED
from odc.experiments.multimodal.examples import MODALITIES, Example, ExampleBatch, Media, Modality, Text, deal
from odc.experiments.multimodal.media import log_mel, patches
from odc.experiments.multimodal.model import TowerGeometry
from odc.experiments.multimodal.plan import Planning

_NOWHERE = Path()


def decode(media: Media, geometry: TowerGeometry) -> Tensor:
    """What an encoder takes of one file: patches [P, 3 * patch * patch], or a spectrogram [frames, bins]; fp32."""
    if media.modality == "image":
        size = media.size[0], media.size[1]
        return torch.from_numpy(patches(media.path, size, patch=geometry.patch, merge=geometry.merge))
    mel = log_mel(media.path, geometry.bins)
    if len(mel) != rows(media):
        found, stated = len(mel) / 100, rows(media) / 100
        raise DataError(f"{media.path} is damaged: it decodes to {found:g} s, not to the {stated:g} s of its header")
    return torch.from_numpy(mel)


def empty_input(modality: Modality, geometry: TowerGeometry) -> Tensor:
    """What `decode` returns, of no item."""
    return torch.zeros(0, 3 * geometry.patch**2 if modality == "image" else geometry.bins)


def rows(media: Media) -> int:
    """Rows of what `decode` returns."""
    return media.encoded if media.modality == "image" else media.size[0]


def encode(tower: nn.Module, inputs: Tensor, media: Sequence[Media]) -> Tensor:
    """Features [sum of lengths, width] of one modality's items, which lie end to end in `inputs`, unpadded."""
    features: Tensor
    if media[0].modality == "image":
        features = tower(inputs, torch.tensor([item.size for item in media]))
    else:
        frames = [item.size[0] for item in media]
        features = tower(pad_sequence(list(inputs.split(frames)), batch_first=True), frames)
    return features


def padded_dummy(modality: Modality, geometry: TowerGeometry) -> tuple[Tensor, list[Media]]:
    """The smallest input a tower takes: for transports whose ranks must all run every module."""
    if modality == "image":
        side = geometry.merge
        media = Media(modality, _NOWHERE, (side, side), side * side, 1)
        return torch.zeros(side * side, 3 * geometry.patch**2), [media]
    return torch.zeros(2, geometry.bins), [Media(modality, _NOWHERE, (2,), 1, 1)]


def text_rows(example: Example) -> Tensor:
    """An example's text runs as they travel: int32 [text tokens, 2], id and whether it is trained."""
    texts = [part for part in example.parts if isinstance(part, Text)]
    ids, trained = (np.concatenate([getattr(text, name) for text in texts]) for name in ("tokens", "trained"))
    return torch.from_numpy(np.stack([ids, trained.astype(np.int32)], axis=1))


def labels_of(texts: Tensor, order: Tensor, lengths: Sequence[int]) -> Tensor:
    """Shifted labels int64 [T] of packed sequences, whose `text_rows` lie end to end in `texts`.

    `order`, int64 [T], has for each position the row of `texts` that stands there; media have rows after those.
    """
    trained = torch.where(texts[:, 1].bool(), texts[:, 0].long(), IGNORED)
    media = torch.full((max(0, int(order.max()) + 1 - len(texts)),), IGNORED)
    targets = torch.cat([trained, media])[order]
    targets[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = IGNORED  # nothing predicts a sequence's first position
    return pad(targets[1:], (0, 1), value=IGNORED)


@dataclass(frozen=True)
class Loaded:
    """One minibatch (under pre-balancing, as it was dealt) with this rank's part of it decoded.

    `inputs` has the decoded items of each modality, `texts` the `text_rows`, both end to end. `sampler` is the
    sampler's state after this minibatch was drawn.
    """

    minibatch: ExampleBatch
    inputs: Mapping[Modality, Tensor]
    texts: Tensor
    sampler: dict[str, Any]


def loaded_minibatches(
    examples: Sequence[Example],
    geometry: TowerGeometry,
    sampler: MinibatchSampler,
    planning: Planning,
    rank: int,
    ranks: int,
    steps: int,
) -> Iterator[Loaded]:
    """`steps` minibatches, with the part of `rank` of `ranks` decoded, on the thread of `odc.dispatch.loader`.

    Waits for no other rank. Raises DataError naming a file that cannot be decoded.
    """
    for _ in range(steps):
        chosen = [examples[i] for i in next(sampler)]
        drawn = sampler.state_dict()
        minibatch = planning.dealt(deal(chosen, ranks))
        mine = minibatch.drawn[rank]
        inputs: dict[Modality, Tensor] = {}
        for modality in MODALITIES:
            decoded = [decode(item, geometry) for example in mine for item in example.media(modality)]
            inputs[modality] = torch.cat([empty_input(modality, geometry), *decoded])
        texts = torch.cat([torch.zeros(0, 2, dtype=torch.int32), *(text_rows(example) for example in mine)])
        yield Loaded(minibatch, inputs, texts, drawn)
