"""One response, and microbatches of them.

A row is packed as in `odc.experiments.data.packing`: prompt and response are one document whose response tokens are
labels, so nothing is padded and attention stays inside each sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from odc.experiments.data.documents import Document
from odc.experiments.data.packing import IGNORED, Microbatch, pack, padded_dummy


@dataclass(frozen=True)
class Sample:
    """One response to one prompt.

    Args:
        group: number of the prompt in its step.
        prompt, response: token ids, neither empty.
        log_probs: of the response's tokens when they were drawn.
        reference: of the same under the initial model, or None without a KL term.
        reward: the task's.
    """

    group: int
    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    reference: list[float] | None
    reward: float

    def __len__(self) -> int:
        """Tokens of both."""
        return len(self.prompt) + len(self.response)

    def document(self) -> Document:
        """Both in one row; the response is what is trained."""
        tokens = np.asarray(self.prompt + self.response, np.int32)
        return Document("sample", tokens, np.arange(len(tokens)) >= len(self.prompt))


@dataclass(frozen=True, eq=False)
class Batch:
    """A microbatch of samples; T response tokens in all, sample after sample. All fp32 [T].

    Args:
        inputs: the packed row.
        log_probs: of the tokens when they were drawn.
        reference: of the same under the initial model, or None.
        advantages: of the sample that the token belongs to.
    """

    inputs: Microbatch
    log_probs: Tensor
    reference: Tensor | None
    advantages: Tensor


def batch_of(samples: Sequence[Sample], advantages: Sequence[float]) -> Batch:
    """One microbatch of `samples`; without any a dummy of one token and T = 0."""
    if not samples:
        return Batch(padded_dummy(), torch.zeros(0), None, torch.zeros(0))
    reference = None
    if samples[0].reference is not None:
        reference = torch.tensor([value for sample in samples for value in sample.reference or []])
    return Batch(
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
