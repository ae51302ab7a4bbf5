"""Draws and decodes minibatches; `odc.dispatch.loader` calls it on its thread and plans each one ahead.

Chose to decode what a rank drew and nothing else, and to move it to where it is computed, as OrchMLLM does: the data
of a real corpus lies where its loader is. Sizes are known to every rank, because every rank has read all headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from odc.experiments.data.sampling import MinibatchSampler
from odc.experiments.multimodal.examples import MODALITIES, Example, Modality
from odc.experiments.multimodal.minibatch import Minibatch, deal
from odc.experiments.multimodal.model import Geometry
from odc.experiments.multimodal.passes import decode, empty_input, text_rows
from odc.experiments.multimodal.plan import Planning


@dataclass(frozen=True)
class Loaded:
    """One minibatch with this rank's part of it decoded.

    Args:
        minibatch: what every rank drew, or under pre-balancing was dealt.
        inputs: of each modality the decoded items of this rank, end to end.
        texts: `text_rows` of this rank's examples, end to end.
    """

    minibatch: Minibatch
    inputs: Mapping[Modality, Tensor]
    texts: Tensor


def loaded_minibatches(
    examples: Sequence[Example],
    geometry: Geometry,
    sampler: MinibatchSampler,
    planning: Planning,
    rank: int,
    ranks: int,
    steps: int,
) -> Iterator[Loaded]:
    """`steps` minibatches, with the part of `rank` of `ranks` decoded. Waits for nobody.

    Raises DataError naming a file that cannot be decoded.
    """
    for _ in range(steps):
        minibatch = planning.dealt(deal([examples[i] for i in next(sampler)], ranks))
        mine = minibatch.drawn[rank]
        inputs: dict[Modality, Tensor] = {}
        for modality in MODALITIES:
            decoded = [decode(item, geometry) for example in mine for item in example.media(modality)]
            inputs[modality] = torch.cat([empty_input(modality, geometry), *decoded])
        texts = torch.cat([torch.zeros(0, 2, dtype=torch.int32), *(text_rows(example) for example in mine)])
        yield Loaded(minibatch, inputs, texts)
