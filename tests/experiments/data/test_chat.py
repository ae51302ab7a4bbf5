"""Conversations: exactly the assistant's words and their end mark are trained on, by ChatML and by templates."""

from __future__ import annotations

import re

import numpy as np
import pytest

from odc.errors import DataError
from odc.experiments.data.chat import by_template, chatml, marked

CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "A2"},
    {"role": "user", "content": "unanswered"},
]


def encode(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def located(text: str) -> tuple[np.ndarray, np.ndarray]:
    ids = encode(text)
    return ids, np.stack([np.arange(len(ids)), np.arange(len(ids)) + 1], 1)


def shown(tokens: np.ndarray, trained: np.ndarray) -> tuple[str, str]:
    """The whole text and the trained part of it; 1 and 2 stand for the marks."""
    text = "".join("<" if t == 1 else ">" if t == 2 else chr(t) for t in tokens)
    return text, "".join(c for c, keep in zip(text, trained, strict=True) if keep)


def test_chatml():
    text, trained = shown(*chatml(CHAT, encode, 1, 2))
    assert text == "<system\nS>\n<user\nQ1>\n<assistant\nA1>\n<user\nQ2>\n<assistant\nA2>"
    assert trained == "A1>A2>"


def test_without_assistant_nothing_is_left():
    tokens, trained = chatml(CHAT[:2], encode, 1, 2)
    assert tokens.shape == trained.shape == (0,)
    assert (tokens.dtype, trained.dtype) == (np.int32, np.bool_)


def render(messages, ask: bool) -> str:
    return "".join(f"<{m['role']}\n{m['content']}>\n" for m in messages) + ("<assistant\n" if ask else "")


def test_turns_before_the_first_are_context():
    assert shown(*chatml(CHAT, encode, 1, 2, first=3))[1] == "A2>"
    tokens, trained = by_template(CHAT, render, located, first=3)
    assert bytes(tokens[trained].tolist()) == b"A2>"


def test_template_gives_the_same_as_chatml():
    def special(text: str) -> np.ndarray:
        return np.asarray([{"<": 1, ">": 2}.get(c, ord(c)) for c in text], np.int32)

    expected = chatml(CHAT, encode, 1, 2)
    for found in (
        by_template(CHAT, render, lambda text: (special(text), located(text)[1])),
        by_template(CHAT, render, lambda text: (special(text), None)),
    ):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
    assert len(by_template(CHAT[:2], render, located)[0]) == 0


def test_template_that_rewrites_earlier_turns_is_refused():
    def forgets(messages, ask: bool) -> str:
        return render([m for m in messages[:-1] if m["role"] != "assistant"] + list(messages[-1:]), ask)

    with pytest.raises(DataError, match="message 4 follows"):
        by_template(CHAT, forgets, located)


def of_runs(text: str) -> tuple[np.ndarray, np.ndarray]:
    """A token is a run of spaces, or a full stop with the space that follows, or a character; ids are their lengths."""
    spans = np.asarray([match.span() for match in re.finditer(r" +|\. ?|.", text)], np.int64).reshape(-1, 2)
    return (spans[:, 1] - spans[:, 0]).astype(np.int32), spans


def test_an_answer_begins_where_the_prompt_ends_and_ends_with_its_last_token():
    tokens, trained = marked("q:a. r:b", [(2, 4), (7, 8)], of_runs)
    assert tokens.tolist() == [1, 1, 1, 2, 1, 1, 1], "the space after the full stop belongs to its token"
    assert trained.tolist() == [False, False, True, True, False, False, True]
    tokens, trained = marked("q:   a", [(3, 6)], of_runs)
    assert tokens.tolist() == [1, 1, 1, 2, 1], "the run of spaces is cut"
    assert trained.tolist() == [False, False, False, True, True]
    tokens, trained = marked("q:a", [(3, 3)], of_runs)
    assert len(tokens) == 3 and not trained.any(), "an answer without a character"


def test_a_tokenizer_that_locates_no_tokens_is_refused_where_answers_alone_have_others():
    def prefixing(text: str) -> tuple[np.ndarray, None]:
        return encode("_" + text), None

    with pytest.raises(DataError, match="an answer alone has other tokens than within its text"):
        by_template(CHAT, render, prefixing)
