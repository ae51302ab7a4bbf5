"""What this rank stores, and other hosts must see, is also sent there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class WordSink(Protocol):
    """The way to other hosts. Each method is called after this rank has stored what it sends, and on any thread."""

    def up(self, partner: int) -> bool:
        """Whether everything that is sent from now on reaches `partner`."""

    def stored(self, index: int, value: int) -> None:
        """A word of this rank's board."""
        return

    def refresh(self) -> None:
        """Called now and then by a thread that waits, for words that need not be sent at once."""
        return

    def send_counts(self, counts: torch.Tensor) -> None:
        """Push counts of this rank, int64 [parameters], to all other hosts. Before DONE; may wait for a slow host."""
        return

    def send_words(self, host: int, region: str, first: int, values: Sequence[int]) -> None:
        """Words of an arena, to one host: those from `first` on of this rank's `region`."""
        return


class NoOtherHosts(WordSink):
    """The sink of a rank whose peers are all on its host."""

    def up(self, partner: int) -> bool:
        return True
