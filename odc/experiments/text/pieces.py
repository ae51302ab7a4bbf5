"""Pieces of split samples in a training step: a job's Splitter, and the model's arguments for a piece of a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from odc.balance import Plan, longest_in_pieces, longest_piece, most_pieces
from odc.errors import ConfigError
from odc.experiments.config import JobConfig
from odc.experiments.data.documents import Document
from odc.experiments.data.packing import pack
from odc.experiments.text.model import empty_model
from odc.split import SamplePiece, Splitter, ranks_of_host


def check_splittable(source: Path) -> None:
    """Raises `UnsupportedError`, listing the reasons, if samples of the model of `source` cannot be split.

    Builds the model without weights. Raises `ConfigError` if there is no such model.
    """
    from odc.split.models import hook

    hook(empty_model(source))


def splitter_of(model: Any, longest: int, max_tokens: int, node: int, timeout_s: float, keep: bool = True) -> Splitter:
    """Splits samples of at most `longest` tokens into pieces of at most `max_tokens`, on the `node` ranks of a host."""
    most = min(max_tokens, longest_piece(longest))
    return Splitter(model, longest, piece_tokens=most, keep=keep, node=node, timeout_s=timeout_s)


class DocumentPieces:
    """The pieces of one rank, of documents of at most `longest` tokens. Every rank makes one, of a sharded model.

    Raises `UnsupportedError` if samples of the model cannot be split, and `ConfigError` if the longest one cannot, for
    want of ranks on this host.
    """

    def __init__(self, model: Any, config: JobConfig, longest: int, device: torch.device) -> None:
        self._device, self._cap, node = device, config.max_tokens, ranks_of_host()
        self._most_pieces = most_pieces(node)
        if longest > longest_in_pieces(self._cap, self._most_pieces):
            raise ConfigError(
                f"max_tokens: a document of {longest} does not fit in {self._most_pieces} pieces of {self._cap} "
                f"tokens, one on each rank of a host; take at least {-(-longest // self._most_pieces)}"
            )
        # The recompute of a checkpointed block puts its keys and values once more.
        keep = not config.activation_checkpointing
        self.splitter = splitter_of(model, longest, self._cap, node, config.timeout_s, keep=keep)

    def least_cap(self, longest: int) -> int:
        """Least cap on tokens, at most the job's own, under which a document of `longest` tokens can be planned."""
        return min(self._cap, longest, max(2, -(-longest // self._most_pieces)))

    def of(self, plan: Plan, documents: Sequence[Document]) -> Iterator[tuple[SamplePiece, dict[str, Any]]]:
        """This rank's pieces and the model's arguments for each; forward and backward come before the next.

        Every rank exhausts it for every plan, before its microbatches.
        """
        for piece in self.splitter.pieces(plan):
            whole = pack([documents[piece.sample]]).to(self._device)
            given = piece.of(whole.input_ids[0], targets=whole.labels[0])
            yield piece, {**given.inputs, "labels": given.targets[None]}
