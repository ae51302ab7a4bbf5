"""What is learnt from: a task's prompts, responses to them with rewards, and batches of both, all as token ids.

Prompt and response are one packed document whose response tokens are labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from odc.balance import Plan
from odc.experiments.data.documents import Document
from odc.experiments.data.packing import IGNORED, Microbatch, pack, padded_dummy
from odc.split import Splitter
from odc.trace import piece_of


class Task(Protocol):
    """Used on every rank; must pickle (a module-level class) where `odc.experiments.grpo.run` starts the ranks."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end a response; the stop token belongs to it."""

    def prompts(self, step: int) -> list[list[int]]:
        """Token ids of each prompt of a step, from 0; always as many."""

    def reward(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        """How good a response is; any finite number."""


@dataclass(frozen=True)
class UpperHalf:
    """The toy task: answer random tokens with tokens from the upper half of the vocabulary; 1 is the best reward.

    A step has `count` prompts of `length` tokens. The first `stops` of `vocab` ids end a response.
    """

    vocab: int
    count: int
    length: int
    seed: int = 0
    stops: int = 8

    @property
    def stop_ids(self) -> range:
        """The lowest ids: a model with random weights stops after vocab / stops tokens on average."""
        return range(self.stops)

    def prompts(self, step: int) -> list[list[int]]:
        draw = np.random.default_rng([self.seed, step])
        return [[int(i) for i in row] for row in draw.integers(self.stops, self.vocab, (self.count, self.length))]

    def reward(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        return sum(token >= self.vocab // 2 for token in response) / len(response)


@dataclass(frozen=True)
class Response:
    """One response: its tokens, their log-probabilities, and those under the reference model or None."""

    tokens: list[int]
    log_probs: list[float]
    reference: list[float] | None


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, with the number of the prompt in its step; neither is empty.

    `log_probs` are those of the response's tokens when they were drawn, `reference` those under the initial model.
    """

    group: int
    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    reference: list[float] | None
    reward: float

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)

    def document(self) -> Document:
        """Both in one row; the response is trained."""
        tokens = np.asarray(self.prompt + self.response, np.int32)
        return Document("sample", tokens, np.arange(len(tokens)) >= len(self.prompt))


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """A microbatch of samples: a packed row, and fp32 [T] for its T response tokens, sample after sample."""

    inputs: Microbatch
    log_probs: Tensor
    reference: Tensor | None
    advantages: Tensor


def batch_of(samples: Sequence[Sample], advantages: Sequence[float]) -> SampleBatch:
    """One microbatch of `samples`; without any a dummy of one token and T = 0."""
    if not samples:
        return SampleBatch(padded_dummy(), torch.zeros(0), None, torch.zeros(0))
    reference = None
    if samples[0].reference is not None:
        reference = torch.tensor([value for sample in samples for value in sample.reference or []])
    return SampleBatch(
        inputs=pack([sample.document() for sample in samples]),
        log_probs=torch.tensor([value for sample in samples for value in sample.log_probs]),
        reference=reference,
        advantages=torch.tensor(
            [own for sample, own in zip(samples, advantages, strict=True) for _ in sample.response]
        ),
    )


@dataclass(frozen=True, eq=False)
class ResponsePart:
    """What one forward takes: the model's arguments, its labels (int64 [1, L]), and the values of its labels.

    `batch` has one entry for each label; of a piece of a split sample `batch.inputs` is the whole sample, and `unit`
    names it in spans.
    """

    inputs: dict[str, Any]
    labels: Tensor
    batch: SampleBatch
    unit: str = ""


def response_pieces(
    splitter: Splitter, plan: Plan, samples: Sequence[Sample], advantages: Sequence[float]
) -> Iterator[ResponsePart]:
    """This rank's pieces of split samples; forward and backward come before the next.

    Every rank exhausts it for every plan, before its microbatches.
    """
    for piece in splitter.pieces(plan):
        whole = batch_of([samples[piece.sample]], [advantages[piece.sample]])
        given = piece.of(whole.inputs.input_ids[0], targets=whole.inputs.labels[0])
        labelled = whole.inputs.labels[0] != IGNORED
        numbers = torch.where(labelled, labelled.cumsum(0) - 1, -1)  # of each position's label among all
        mine = piece.cut.take(piece.place, numbers)
        mine = mine[mine >= 0]
        reference = None if whole.reference is None else whole.reference[mine]
        values = SampleBatch(whole.inputs, whole.log_probs[mine], reference, whole.advantages[mine])
        yield ResponsePart(given.inputs, given.targets[None], values, piece_of(piece.sample))


def token_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """fp32 [T]: the log-probability of each label in `logits` [1, L, vocab] where `labels` int64 [1, L] has one."""
    where = labels[0] != IGNORED
    scores = logits[0][where].float().log_softmax(-1)
    return scores.gather(1, labels[0][where][:, None])[:, 0]
