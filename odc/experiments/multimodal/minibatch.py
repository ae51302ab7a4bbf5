"""A minibatch: its examples in the order they were drawn, and the items of each phase in that same order.

Chose one numbering for everything: an item's number is its *flat source place* (see `odc.dispatch.Rearrangement`), so
that plans, records and tensors need no dictionary between them. An item of the phase `llm` is an example; an item of
`image` or `audio` is one image or clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from odc.experiments.multimodal.examples import MODALITIES, Example, Media, Modality

Phase = Literal["image", "audio", "llm"]
PHASES: Final[tuple[Phase, ...]] = (*MODALITIES, "llm")


@dataclass(frozen=True)
class Minibatch:
    """The examples of one optimizer step.

    Args:
        drawn: [ranks] the examples that each rank drew.
    """

    drawn: Sequence[Sequence[Example]]

    @property
    def examples(self) -> list[Example]:
        """All of them, rank by rank."""
        return [example for mine in self.drawn for example in mine]

    def media(self, modality: Modality) -> list[Media]:
        """All images or clips, rank by rank, example by example."""
        return [media for example in self.examples for media in example.media(modality)]

    def lengths(self, phase: Phase) -> list[list[int]]:
        """[ranks] length, inside the phase's own model, of each item that a rank drew."""
        if phase == "llm":
            return [[example.length for example in mine] for mine in self.drawn]
        return [[item.encoded for example in mine for item in example.media(phase)] for mine in self.drawn]

    @property
    def label_tokens(self) -> int:
        """Targets of the loss over all ranks."""
        return sum(example.label_tokens for example in self.examples)

    @property
    def tokens(self) -> int:
        """Positions of all sequences: what the language model reads."""
        return sum(example.length for example in self.examples)


def deal(examples: Sequence[Example], ranks: int) -> Minibatch:
    """Gives consecutive examples to each rank, as if each had drawn its own; the first may get one more."""
    share, more = divmod(len(examples), ranks)
    ends = [share * (rank + 1) + min(rank + 1, more) for rank in range(ranks)]
    return Minibatch([examples[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)])
