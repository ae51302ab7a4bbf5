"""One rank's passes: its items as tensors through a tower, and back.

Chose one forward for all of a rank's items of a phase, as OrchMLLM does: images packed end to end, clips padded to the
longest, sequences packed end to end. Memory is bounded by what a rank is dealt, not by a cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from odc.multimodal.examples import MODALITIES, Example, Media, Modality, Text
from odc.multimodal.media import log_mel, patches
from odc.multimodal.model import Geometry
from odc.train.packing import IGNORED


def decode(media: Media, geometry: Geometry) -> Tensor:
    """What an encoder takes of one file: patches [P, 3 * patch * patch], or a spectrogram [frames, bins]; fp32."""
    if media.modality == "image":
        size = media.size[0], media.size[1]
        return torch.from_numpy(patches(media.path, size, patch=geometry.patch, merge=geometry.merge))
    return torch.from_numpy(log_mel(media.path, geometry.bins))


def empty_input(modality: Modality, geometry: Geometry) -> Tensor:
    """What `decode` returns, of no item."""
    return torch.zeros(0, 3 * geometry.patch**2 if modality == "image" else geometry.bins)


def rows(media: Media) -> int:
    """Rows of what `decode` returns."""
    return media.encoded if media.modality == "image" else media.size[0]


def encode(tower: nn.Module, inputs: Tensor, media: Sequence[Media]) -> Tensor:
    """Features [sum of lengths, width] of one modality's items, which lie end to end in `inputs`.

    Padding of audio is made here, so that only real frames travel between ranks.
    """
    features: Tensor
    if media[0].modality == "image":
        features = tower(inputs, torch.tensor([item.size for item in media]))
    else:
        frames = [item.size[0] for item in media]
        features = tower(pad_sequence(list(inputs.split(frames)), batch_first=True), frames)
    return features


def padded_dummy(modality: Modality, geometry: Geometry) -> tuple[Tensor, list[Media]]:
    """The smallest input a tower takes: for transports whose ranks must all run every module."""
    if modality == "image":
        side = geometry.merge
        media = Media(modality, _NOWHERE, (side, side), side * side, 1)
        return torch.zeros(side * side, 3 * geometry.patch**2), [media]
    return torch.zeros(2, geometry.bins), [Media(modality, _NOWHERE, (2,), 1, 1)]


@dataclass(frozen=True, eq=False)
class Sequences:
    """A rank's sequences, packed; arguments of `LanguageModel` but for the features themselves.

    Args:
        ids, labels: int64 [T].
        lengths: of each example.
        where: of each modality, the positions of its features in order, int64.
    """

    ids: Tensor
    labels: Tensor
    lengths: list[int]
    where: dict[Modality, Tensor]


def text_rows(example: Example) -> Tensor:
    """An example's text runs as they travel: int32 [text tokens, 2], id and whether it is trained."""
    texts = [part for part in example.parts if isinstance(part, Text)]
    ids, trained = (np.concatenate([getattr(text, name) for text in texts]) for name in ("tokens", "trained"))
    return torch.from_numpy(np.stack([ids, trained.astype(np.int32)], axis=1))


def assemble(examples: Sequence[Example], texts: Tensor) -> Sequences:
    """Interleaves text and places for media in reading order.

    Args:
        examples: this rank's; of them only the kinds and lengths of parts are read, not the tokens.
        texts: `text_rows` of all of them end to end, as they arrived.
    """
    ids, trained, taken, position = [], [], 0, 0
    where: dict[Modality, list[Tensor]] = {modality: [] for modality in MODALITIES}
    for example in examples:
        for part in example.parts:
            if isinstance(part, Text):
                run = texts[taken : taken + part.length]
                ids.append(run[:, 0].long())
                trained.append(run[:, 1].bool())
                taken += part.length
            else:
                ids.append(torch.zeros(part.length, dtype=torch.int64))
                trained.append(torch.zeros(part.length, dtype=torch.bool))
                where[part.modality].append(torch.arange(position, position + part.length))
            position += part.length
    lengths = [example.length for example in examples]
    tokens, targets = torch.cat(ids), torch.cat(trained)
    targets[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = False  # nothing predicts a sequence's first position
    labels = pad(torch.where(targets, tokens, IGNORED)[1:], (0, 1), value=IGNORED)
    empty = torch.zeros(0, dtype=torch.int64)
    return Sequences(tokens, labels, lengths, {m: torch.cat([empty, *places]) for m, places in where.items()})


def padded_sequence() -> Sequences:
    """One position without a target."""
    one, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return Sequences(one, torch.full_like(one, IGNORED), [1], dict.fromkeys(MODALITIES, none))


_NOWHERE = Path()
