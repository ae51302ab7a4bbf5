"""Conversations: exactly the assistant's words and their end mark are trained on, by ChatML and by templates."""

from __future__ import annotations

import numpy as np
import pytest

from odc.errors import DataError
from odc.experiments.data.chat import by_template, chatml

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
    tokens, trained = by_template(CHAT, render, encode, first=3)
    assert bytes(tokens[trained].tolist()) == b"A2>"


def test_template_gives_the_same_as_chatml():
    def marked(text: str) -> np.ndarray:
        return np.asarray([{"<": 1, ">": 2}.get(c, ord(c)) for c in text], np.int32)

    tokens, trained = by_template(CHAT, render, marked)
    expected = chatml(CHAT, encode, 1, 2)
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_array_equal(trained, expected[1])


def test_template_that_rewrites_earlier_turns_is_refused():
    def forgets(messages, ask: bool) -> str:
        return render([m for m in messages[:-1] if m["role"] != "assistant"] + list(messages[-1:]), ask)

    with pytest.raises(DataError, match="message 4 follows"):
        by_template(CHAT, forgets, encode)
