"""What is learnt from: a task's prompts, responses to them with rewards, and microbatches of both, all as token ids.

Prompt and response are one packed document whose response tokens are labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from odc.experiments.data.documents import Document
from odc.experiments.data.packing import IGNORED, Microbatch, pack, padded_dummy


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


def token_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """fp32 [T]: the log-probability of each label in `logits` [1, L, vocab] where `labels` int64 [1, L] has one."""
    where = labels[0] != IGNORED
    scores = logits[0][where].float().log_softmax(-1)
    return scores.gather(1, labels[0][where][:, None])[:, 0]
