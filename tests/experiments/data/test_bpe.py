"""The trained BPE: cached by content, the same for all who start at once, and never half written."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest

from odc.errors import DataError
from odc.experiments.data.bpe import SMALLEST_VOCAB, cached_bpe, content_hash, publish
from odc.experiments.data.sources import RawDocument

pytest.importorskip("tokenizers", reason="needs the train extra")

CORPUS = [RawDocument(str(i), f"value_{i} = compute(value_{i - 1})\n" * 20) for i in range(10)]


def test_second_call_reads_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = cached_bpe(CORPUS, 300, tmp_path)
    monkeypatch.setattr("odc.experiments.data.bpe._train", lambda *_: pytest.fail("trained again"))
    assert cached_bpe([RawDocument("renamed", d.content) for d in CORPUS], 300, tmp_path).fingerprint == (
        first.fingerprint
    )
    assert len(list(tmp_path.iterdir())) == 1


def test_content_order_kind_and_size_make_another_one(tmp_path: Path):
    chat = RawDocument("c", ({"role": "user", "content": "x"},))
    assert len({content_hash(d) for d in (CORPUS, CORPUS[::-1], [*CORPUS, chat])}) == 3
    assert content_hash([RawDocument("a", "xy"), RawDocument("b", "z")]) != content_hash(
        [RawDocument("a", "x"), RawDocument("b", "yz")]
    )
    cached_bpe(CORPUS, 300, tmp_path)
    cached_bpe(CORPUS, 301, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_messages_are_trained_on(tmp_path: Path):
    chat = [RawDocument("c", ({"role": "assistant", "content": "abababab " * 50},))]
    assert len(cached_bpe(chat, 280, tmp_path).encode("abababab")) < 8


def _fingerprint(cache: str) -> str:
    return cached_bpe(CORPUS, 300, Path(cache)).fingerprint


def test_processes_that_start_at_once_agree(tmp_path: Path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        prints = pool.map(_fingerprint, [str(tmp_path)] * 3, chunksize=1)
    assert len(set(prints)) == 1
    assert len(list(tmp_path.iterdir())) == 1, "no partial file stays behind"


def test_first_file_wins(tmp_path: Path):
    publish(tmp_path / "x", b"first")
    publish(tmp_path / "x", b"second")
    assert (tmp_path / "x").read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DataError, match=f"at least {SMALLEST_VOCAB}"):
        cached_bpe(CORPUS, SMALLEST_VOCAB - 1, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write to the cache"):
        cached_bpe(CORPUS, 300, tmp_path / "file" / "below")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install -e '.\[train\]'"):
        cached_bpe(CORPUS, 300, tmp_path / "new")
