from __future__ import annotations

import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.tiny_job import tiny_job

from odc.experiments.data.bpe import BpeTokenizer
from odc.experiments.data.dataset import Dataset, load_dataset
from odc.experiments.data.documents import Document
from odc.experiments.data.tokenizer import HfTokenizer
from odc.experiments.progress import Progress


def _quiet() -> Progress:
    return Progress(1, shown=False)


def test_a_bpe_is_trained_unless_the_model_brings_its_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the train extra")
    config = tiny_job(tmp_path, tokenizer="auto", vocab=300)
    trained = load_dataset(config, _quiet()).tokenizer
    assert isinstance(trained, BpeTokenizer) and 259 <= trained.vocab_size <= 300
    folder = tmp_path / "model"
    trained.save(folder)
    loaded = load_dataset(config.with_(model=str(folder)), _quiet())
    assert isinstance(loaded.tokenizer, HfTokenizer)
    assert loaded.lengths == load_dataset(config, _quiet()).lengths


def test_it_says_what_it_does_and_what_was_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.WARNING, logger="odc"):
        dataset = load_dataset(tiny_job(tmp_path, max_tokens=30, long="split"), Progress(1, stream=stream))
    assert max(dataset.lengths) == 30
    assert "reading" in stream.getvalue() and "tokenizing 40 documents" in stream.getvalue()
    assert "split" in caplog.text and "more than the cap of 30" in caplog.text


def test_ids_that_never_occur_do_not_count() -> None:
    def holding(*ids: int) -> Document:
        return Document("", np.asarray(ids, np.int32), np.ones(len(ids), np.bool_))

    tokenizer: Any = SimpleNamespace(vocab_size=100, ends=[2])
    assert Dataset([holding(1, 7, 3), holding(4)], tokenizer).vocab_size == 8
    assert Dataset([holding(1, 7, 3)], tokenizer, valid=[holding(1, 9)]).vocab_size == 10
    tokenizer.ends = [2, 11]
    assert Dataset([holding(1, 7, 3)], tokenizer, valid=[holding(1, 9)]).vocab_size == 12
