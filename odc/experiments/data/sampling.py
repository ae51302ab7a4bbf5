"""Which samples make up each minibatch: endless shuffled epochs, the same on every rank without asking any.

Chose a permutation that is a function of seed and epoch alone over a stateful generator: the sampler's whole state is
one counter, so resume is exact and costs nothing. Minibatches run across the end of an epoch, so no sample is left out;
the price is that one minibatch may then hold the same sample twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc.errors import DataError


class MinibatchSampler:
    """Endless minibatches of sample indices. Every rank builds its own and gets the same; nothing synchronizes.

    Args:
        documents: number of samples, at least 1.
        minibatch_size: samples of one minibatch over all ranks, at least 1.
        seed: decides the order, 0 or more.
    """

    def __init__(self, documents: int, minibatch_size: int, seed: int = 0) -> None:
        if documents < 1:
            raise DataError("there are no documents to draw minibatches from")
        if minibatch_size < 1:
            raise DataError(f"minibatch_size must be at least 1, not {minibatch_size!r}")
        self._documents = documents
        self._minibatch_size = minibatch_size
        self._seed = seed
        self._drawn = 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> int:
        """Passes over the data that have been drawn completely."""
        return self._drawn // self._documents

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        indices = [self._at(position) for position in range(self._drawn, self._drawn + self._minibatch_size)]
        self._drawn += self._minibatch_size
        return indices

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state as plain numbers: samples drawn so far, and what it was made with."""
        return {"drawn": self._drawn, "documents": self._documents, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly after the samples that `state` had drawn; the minibatch size may have changed.

        Raises DataError when the number of documents or the seed differs: the order would not be the same.
        """
        for name, own in (("documents", self._documents), ("seed", self._seed)):
            if state[name] != own:
                raise DataError(f"the checkpoint was made with {name}={state[name]}, this job has {name}={own}")
        self._drawn = int(state["drawn"])

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self._documents)
        if self._order is None or self._order[0] != epoch:
            # numpy promises never to change what RandomState draws; other generators may change between versions.
            bits = np.random.MT19937(np.random.SeedSequence([self._seed, epoch]))
            self._order = (epoch, np.random.RandomState(bits).permutation(self._documents))
        return int(self._order[1][offset])
