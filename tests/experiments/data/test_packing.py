"""Packed microbatches by hand: positions restart, labels are shifted and never cross a document."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from odc.errors import DataError
from odc.experiments.data.documents import Document
from odc.experiments.data.packing import IGNORED, Microbatch, pack


def document(tokens: list[int], trained: list[int] | None = None) -> Document:
    flags = trained if trained is not None else [0] + [1] * (len(tokens) - 1)
    return Document("d", np.asarray(tokens, np.int32), np.asarray(flags, np.bool_))


def test_two_documents_by_hand():
    mb = pack([document([5, 6, 7]), document([8, 9], [0, 1])])
    assert mb.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert mb.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert mb.labels.tolist() == [[6, 7, IGNORED, 9, IGNORED]]
    assert (mb.lengths, mb.label_tokens, mb.input_ids.shape) == ((3, 2), 3, (1, 5))
    assert {t.dtype for t in (mb.input_ids, mb.position_ids, mb.labels)} == {torch.int64}
    assert pack([document([5, 6, 7, 8], [0, 0, 1, 0])]).labels.tolist() == [[IGNORED, 7, IGNORED, IGNORED]]
    trained_first = pack([document([5, 6]), document([7, 8], [1, 1])])
    assert trained_first.labels.tolist() == [[6, IGNORED, 8, IGNORED]], (
        "no document predicts the next one's first token"
    )


def test_model_inputs():
    mb = pack([document([5, 6, 7]), document([8])])
    inputs = mb.model_inputs()
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 3, 4]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 3
    assert inputs["labels"] is mb.labels
    assert "labels" not in mb.model_inputs(labels=False)
    assert inputs["use_cache"] is False


def test_to_keeps_everything():
    mb = pack([document([5, 6, 7])])
    moved = mb.to("meta")
    assert moved.input_ids.device.type == moved.labels.device.type == moved.position_ids.device.type == "meta"
    assert (moved.lengths, moved.label_tokens) == (mb.lengths, mb.label_tokens)


def test_a_peer_makes_the_same_microbatch_of_its_tensors():
    mb = pack([document([5, 6, 7], [0, 1, 0]), document([8, 9])])
    tensors = mb.tensors()
    assert {t.dtype for t in tensors.values()} == {torch.int32}
    again = Microbatch.from_tensors(tensors)
    assert (again.lengths, again.label_tokens) == (mb.lengths, mb.label_tokens) == ((3, 2), 2)
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.equal(getattr(again, name), getattr(mb, name)) and getattr(again, name).dtype == torch.int64


def test_bad_input():
    with pytest.raises(DataError, match="padded_dummy"):
        pack([])
    with pytest.raises(DataError, match="document d has no tokens"):
        pack([document([], [])])
