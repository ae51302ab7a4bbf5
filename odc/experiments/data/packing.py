"""Packed microbatches: documents laid end to end in one row, without padding.

Labels are shifted here, once: `labels[t]` is the token that position t must predict, within its own document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odc.errors import DataError
from odc.experiments.data.documents import Document

IGNORED = -100  # label of a position without a target


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One forward and backward of one rank, of documents of `lengths` tokens, T together. All tensors are int64 [1, T].

    Positions restart at 0 in every document. Labels are `IGNORED` where nothing is predicted: at each document's last
    token and before tokens that are not trained; `label_tokens` counts the others.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    lengths: tuple[int, ...]
    label_tokens: int

    def model_inputs(self, labels: bool = True) -> dict[str, Any]:
        """Keyword arguments for a transformers causal LM whose attention is `odc_documents` or FlashAttention.

        With `labels` the model must have the loss of `odc.experiments.text.loss`; without, it returns its usual output.
        """
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32))
        longest = max(self.lengths)
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": longest,
            "max_length_k": longest,
            "use_cache": False,
        }
        return inputs | {"labels": self.labels} if labels else inputs

    def tensors(self) -> dict[str, Tensor]:
        """What a peer needs to make the same microbatch, 8 bytes a token: int32 ids, labels and lengths."""
        return {
            "input_ids": self.input_ids[0].to(torch.int32),
            "labels": self.labels[0].to(torch.int32),
            "lengths": torch.tensor(self.lengths, dtype=torch.int32),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Microbatch:
        lengths, labels = tuple(tensors["lengths"].tolist()), tensors["labels"].to(torch.int64)
        return cls(
            input_ids=tensors["input_ids"].to(torch.int64)[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            labels=labels[None],
            lengths=lengths,
            label_tokens=int((labels != IGNORED).sum()),
        )

    def to(self, device: torch.device | str) -> Microbatch:
        moved = {name: getattr(self, name).to(device) for name in ("input_ids", "position_ids", "labels")}
        return replace(self, **moved)


def pack(documents: Sequence[Document]) -> Microbatch:
    """Lay `documents` end to end, in order. DataError without documents or for an empty one."""
    if not documents:
        raise DataError("a microbatch needs at least one document; pad counts with padded_dummy()")
    for document in documents:
        if not len(document):
            raise DataError(f"document {document.name} has no tokens")
    tokens = np.concatenate([document.tokens for document in documents]).astype(np.int64)
    labels = np.concatenate([_labels(document) for document in documents])
    lengths = torch.tensor([len(document) for document in documents])
    ids = torch.from_numpy(tokens)
    return Microbatch.from_tensors({"input_ids": ids, "labels": torch.from_numpy(labels), "lengths": lengths})


def padded_dummy() -> Microbatch:
    """One token without a label, with a loss and gradients of 0, for arms that must pad microbatch counts."""
    zero = torch.zeros(1, 1, dtype=torch.int64)
    return Microbatch(zero, zero.clone(), torch.full_like(zero, IGNORED), (1,), 0)


def _labels(document: Document) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The next token where it is trained; the document's last position predicts nothing."""
    labels = np.full(len(document), IGNORED, np.int64)
    trained = document.trained[1:]
    labels[:-1][trained] = document.tokens[1:][trained]
    return labels
