"""Pieces of split samples in a GRPO update: a job's Splitter, and what a piece learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odc.balance import Plan
from odc.experiments.data.packing import IGNORED
from odc.experiments.grpo.config import GrpoConfig
from odc.experiments.grpo.samples import Sample, SampleBatch, batch_of
from odc.split import SamplePiece, Splitter, ranks_of_host


@dataclass(frozen=True, eq=False)
class ResponsePiece:
    """One piece: the model's arguments, its labels (int64 [1, tokens of the piece]), and the values of its labels.

    `batch.inputs` is the whole sample; the other fields of `batch` have one entry for each label of the piece.
    """

    piece: SamplePiece
    inputs: dict[str, Any]
    labels: Tensor
    batch: SampleBatch


class ResponsePieces:
    """The pieces of one rank, of samples of at most `config.longest` tokens. Every rank makes one, of a sharded model.

    Raises `UnsupportedError` if samples of the model cannot be split.
    """

    def __init__(self, model: Any, config: GrpoConfig) -> None:
        self.node = ranks_of_host()
        self._splitter = Splitter(
            model,
            config.longest,
            # In zig-zag pieces of two slices each, both rounded up.
            piece_tokens=min(config.max_tokens, -(-config.longest // 2) + 1),
            node=self.node,
            timeout_s=config.timeout_s,
        )

    def prepare(self) -> None:
        """Run a random sample whole and split, and make the arenas; all ranks call it, outside a minibatch.

        Raises `UnsupportedError` if the outputs differ, and `HeapMemoryError` without room for the arenas.
        """
        self._splitter.prepare()

    def of(self, plan: Plan, samples: Sequence[Sample], advantages: Sequence[float]) -> Iterator[ResponsePiece]:
        """This rank's pieces; forward and backward come before the next.

        Every rank exhausts it for every plan, before its microbatches.
        """
        for piece in self._splitter.pieces(plan):
            whole = batch_of([samples[piece.sample]], [advantages[piece.sample]])
            given = piece.of(whole.inputs.input_ids[0], targets=whole.inputs.labels[0])
            labelled = whole.inputs.labels[0] != IGNORED
            numbers = torch.where(labelled, labelled.cumsum(0) - 1, -1)  # of each position's label among all
            mine = piece.cut.take(piece.place, numbers)
            mine = mine[mine >= 0]
            reference = None if whole.reference is None else whole.reference[mine]
            values = SampleBatch(whole.inputs, whole.log_probs[mine], reference, whole.advantages[mine])
            yield ResponsePiece(piece, given.inputs, given.targets[None], values)

    def close(self) -> None:
        """Waits until other ranks have read what lies here."""
        self._splitter.close()
