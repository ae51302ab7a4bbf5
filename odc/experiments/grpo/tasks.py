"""What is to be learnt: prompts, and a reward for each response.

Chose token ids on both sides over text: a toy task needs no tokenizer, and a task on text decodes where it scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Task(Protocol):
    """Used on every rank; must pickle (a module-level class) where `odc.experiments.grpo.run` starts the ranks."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end a response; the stop token belongs to it."""
        ...

    def prompts(self, step: int) -> list[list[int]]:
        """Token ids of each prompt of a step, from 0; always as many."""
        ...

    def reward(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        """How good a response is; any finite number."""
        ...


@dataclass(frozen=True)
class UpperHalf:
    """The toy task: answer random tokens with tokens from the upper half of the vocabulary; 1 is the best reward.

    Args:
        vocab: ids there are; the first `stops` end a response.
        count, length: prompts of a step, and their tokens.
        seed: of the prompts.
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
        """Uniformly random ids that are no stop tokens."""
        draw = np.random.default_rng([self.seed, step])
        return [[int(i) for i in row] for row in draw.integers(self.stops, self.vocab, (self.count, self.length))]

    def reward(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        """The share of the response's tokens that lie in the upper half."""
        return sum(token >= self.vocab // 2 for token in response) / len(response)
