"""Documents: tokens and targets by hand, the cap in all three ways, and the cache."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from odc.errors import DataError
from odc.experiments.data.bpe import ByteTokenizer
from odc.experiments.data.documents import Document, load_documents
from odc.experiments.data.sources import PromptCompletion, RawDocument

BYTES = ByteTokenizer()
CHAT = ({"role": "user", "content": "Q"}, {"role": "assistant", "content": "AB"})


def load(*contents: str | tuple, max_tokens: int = 100, **options) -> list[Document]:
    raw = [RawDocument(f"d{i}", content) for i, content in enumerate(contents)]
    return load_documents(raw, BYTES, max_tokens=max_tokens, **options)


def test_text_ends_with_the_end_token_and_all_but_the_first_is_trained():
    (document,) = load("abc")
    assert document.tokens.tolist() == [97, 98, 99, 256]
    assert document.trained.tolist() == [False, True, True, True]
    assert (document.tokens.dtype, document.trained.dtype) == (np.int32, np.bool_)
    assert (len(document), document.label_tokens, document.name) == (4, 3, "d0")


def test_begin_token_where_the_tokenizer_has_one():
    class WithBegin(ByteTokenizer):
        bos_id = 257

    (document,) = load_documents([RawDocument("d", "ab")], WithBegin(), max_tokens=10)
    assert document.tokens.tolist() == [257, 97, 98, 256]
    assert document.trained.tolist() == [False, True, True, True]


def test_messages_train_the_assistant_only():
    (document,) = load(CHAT)
    assert document.tokens[document.trained].tolist() == [*b"AB", 258]


def test_of_a_prompt_and_its_completion_the_completion_is_trained():
    (plain,) = load(PromptCompletion("ask", "AB"))
    assert plain.tokens.tolist() == [*b"askAB", 256]
    assert plain.tokens[plain.trained].tolist() == [*b"AB", 256]
    (alone,) = load(PromptCompletion("", "AB"))
    assert alone.tokens[alone.trained].tolist() == [*b"B", 256], "nothing comes before the first token"
    (chat,) = load(PromptCompletion(CHAT, ({"role": "user", "content": "R"}, {"role": "assistant", "content": "CD"})))
    assert chat.tokens[chat.trained].tolist() == [*b"CD", 258], "earlier answers of the assistant are context"


def test_documents_without_a_target_are_left_out(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        documents = load("abc", CHAT[:1])
    assert [document.name for document in documents] == ["d0"]
    assert "left out 1 documents" in caplog.text
    with pytest.raises(DataError, match="none of 1 documents is left"):
        load(CHAT[:1])


def test_over_the_cap_is_named():
    with pytest.raises(DataError, match=r"document d1 has 31 tokens, more than the cap of 10; so have 1 others"):
        load("short", "x" * 30, "y" * 20, max_tokens=10)


def test_over_the_cap_is_dropped(caplog: pytest.LogCaptureFixture):
    documents = load("short", "x" * 30, "y" * 9, max_tokens=10, long="drop")
    assert [document.name for document in documents] == ["d0", "d2"]
    assert "drop 1 of 3 documents over the cap: d1 has 31 tokens" in caplog.text
    with pytest.raises(DataError, match="long='drop'"):
        load("x" * 30, max_tokens=10, long="drop")


@pytest.mark.parametrize("length", [10, 11, 18, 19, 20, 30])
def test_split_keeps_every_target_exactly_once(length: int):
    text = "".join(chr(97 + i % 26) for i in range(length - 1))
    pieces = load(text, max_tokens=10, long="split")
    assert all(2 <= len(piece) <= 10 for piece in pieces)
    assert not any(piece.trained[0] for piece in pieces)
    tokens = [*text.encode(), 256]
    assert [t for piece in pieces for t in piece.tokens[piece.trained].tolist()] == tokens[1:]
    assert all(before.tokens[-1] == after.tokens[0] for before, after in pairwise(pieces))
    if length > 10:
        assert [piece.name for piece in pieces] == [f"d0#{i}" for i in range(len(pieces))]


def test_split_leaves_out_pieces_without_a_target():
    question = {"role": "user", "content": "q" * 40}
    pieces = load((question, CHAT[1]), max_tokens=10, long="split")
    assert [t for piece in pieces for t in piece.tokens[piece.trained].tolist()] == [*b"AB", 258]


def test_cache_gives_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = load("abc", CHAT, "x" * 30, max_tokens=10, long="split", cache=tmp_path)
    monkeypatch.setattr(ByteTokenizer, "encode_many", lambda *_: pytest.fail("encoded again"))
    second = load("abc", CHAT, "x" * 30, max_tokens=10, long="split", cache=tmp_path)
    assert [d.name for d in first] == [d.name for d in second]
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.trained, other.trained)
    assert len(list(tmp_path.iterdir())) == 1


def test_cache_knows_the_tokenizer(tmp_path: Path):
    shifted = ByteTokenizer()
    shifted.fingerprint, shifted.eos_id = "shifted", 258
    raw = [RawDocument("d", "ab")]
    load_documents(raw, BYTES, max_tokens=10, cache=tmp_path)
    (document,) = load_documents(raw, shifted, max_tokens=10, cache=tmp_path)
    assert document.tokens[-1] == 258


def test_bad_input():
    with pytest.raises(DataError, match="max_tokens must be at least 2"):
        load("abc", max_tokens=1)
    with pytest.raises(DataError, match="there are no documents"):
        load_documents([], BYTES, max_tokens=10)
