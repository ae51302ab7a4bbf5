"""Loads minibatches ahead: draws, plans and decodes the next one while the current one trains.

Chose one thread a rank, one minibatch ahead, as OrchMLLM does (section 6, "computation overhead overlapping"): a plan
needs lengths only, so it is done before its step begins. The price is that decoding and planning compete with training
for cores; how long they took, and how long the rank still waited for them, is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from odc.dispatch import StepPlan
from odc.multimodal.examples import MODALITIES, Example, Modality
from odc.multimodal.minibatch import Minibatch, deal
from odc.multimodal.model import Geometry
from odc.multimodal.passes import decode, empty_input, text_rows
from odc.multimodal.plan import Planner
from odc.train.sampling import MinibatchSampler


@dataclass(frozen=True)
class Loaded:
    """One minibatch, ready to train on.

    Args:
        minibatch: what every rank drew, or under pre-balancing was dealt.
        plan: where everything goes.
        plan_s: seconds that planning took, in the loader's thread.
        inputs: of each modality the decoded items that this rank drew, end to end.
        texts: `text_rows` of the examples that this rank drew, end to end.
        waited_s: seconds that the rank waited for it.
    """

    minibatch: Minibatch
    plan: StepPlan
    plan_s: float
    inputs: Mapping[Modality, Tensor]
    texts: Tensor
    waited_s: float


@dataclass(frozen=True)
class Loader:
    """Yields the job's minibatches on one rank; `close` it. Every rank makes its own and gets the same plans.

    Args:
        examples: all of the corpus.
        geometry: of the model.
        sampler: which examples make up each minibatch.
        planner: of every minibatch.
        rank, ranks: whose part is decoded, of how many.
    """

    examples: Sequence[Example]
    geometry: Geometry
    sampler: MinibatchSampler
    planner: Planner
    rank: int
    ranks: int

    def minibatches(self, steps: int) -> Iterator[Loaded]:
        """`steps` minibatches; the thread ends with the last, or when the iterator is closed."""
        with ThreadPoolExecutor(1, "odc-loader") as thread:
            coming: Future[Loaded] = thread.submit(self._load)
            for step in range(steps):
                began = time.perf_counter()
                loaded = coming.result()
                waited = time.perf_counter() - began
                if step + 1 < steps:
                    coming = thread.submit(self._load)
                yield replace(loaded, waited_s=waited)

    def _load(self) -> Loaded:
        drawn = deal([self.examples[i] for i in next(self.sampler)], self.ranks)
        minibatch, plan, seconds = self.planner.plan(drawn)
        mine = minibatch.drawn[self.rank]
        inputs: dict[Modality, Tensor] = {}
        for modality in MODALITIES:
            decoded = [decode(item, self.geometry) for example in mine for item in example.media(modality)]
            inputs[modality] = torch.cat([empty_input(modality, self.geometry), *decoded])
        texts = torch.cat([torch.zeros(0, 2, dtype=torch.int32), *(text_rows(example) for example in mine)])
        return Loaded(minibatch, plan, seconds, inputs, texts, 0.0)
