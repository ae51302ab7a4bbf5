"""What this rank stores, and other hosts must see, is also sent there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from odc.memory import Words
from odc.protocol.words import Word

# Words that threads sleep on (`Waiter.until_word`). A thread that sleeps on another one wakes after WORD_SLEEP_S.
_AWAITED = frozenset({Word.PUBLISHED, Word.DONE, Word.COMPLETE, Word.READ, Word.REDUCED})


class WordSink(Protocol):
    """The way to other hosts. Each method is called after this rank has stored what it sends, and on any thread."""

    def up(self, partner: int) -> bool:
        """Whether everything that is sent from now on reaches `partner`."""

    def stored(self, index: int, value: int) -> None:
        """A word of this rank's board."""

    def refresh(self) -> None:
        """Called now and then by a thread that waits, for words that need not be sent at once."""

    def send_counts(self, counts: torch.Tensor) -> None:
        """Push counts of this rank, int64 [parameters], to all other hosts. Before DONE; may wait for a slow host."""

    def send_words(self, host: int, region: str, first: int, values: Sequence[int]) -> None:
        """Words of an arena, to one host: those from `first` on of this rank's `region`."""


class NoOtherHosts:
    """The sink of a rank whose peers are all on its host."""

    def up(self, partner: int) -> bool:
        return True

    def stored(self, index: int, value: int) -> None:
        return

    def refresh(self) -> None:
        return

    def send_counts(self, counts: torch.Tensor) -> None:
        return

    def send_words(self, host: int, region: str, first: int, values: Sequence[int]) -> None:
        return


class PushedWords(Words):
    """This rank's board in a job over several hosts: what is stored goes into `sink`, and wakes waiting threads."""

    __slots__ = ("_sink",)

    def __init__(self, address: int, count: int, keepalive: object, sink: WordSink) -> None:
        super().__init__(address, count, keepalive)
        self._sink = sink

    def store(self, i: int, value: int) -> None:
        super().store(i, value)
        if i in _AWAITED:
            self.wake(i)
        self._sink.stored(int(i), value)
