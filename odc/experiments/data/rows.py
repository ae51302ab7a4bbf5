"""What one row of a data set holds: a text, a conversation, or a prompt and the completion that is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from odc.errors import DataError

Message = dict[str, str]
COLUMNS = "'messages', 'prompt' and 'completion', or 'text'"


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt, which is context, and its completion, the targets of the loss: two texts, or messages in both."""

    prompt: str | tuple[Message, ...]
    completion: str | tuple[Message, ...]


Content = str | tuple[Message, ...] | PromptCompletion


def content_of(row: Any, where: str) -> Content:
    """The row's messages if it has any, else its prompt and completion, else its text; other columns are not read.

    Raises DataError, which begins with `where`.
    """
    if isinstance(row, dict):
        if row.get("messages") is not None:
            return _messages(row["messages"], where, "messages")
        if row.get("prompt") is not None and row.get("completion") is not None:
            return _pair(row["prompt"], row["completion"], where)
        if row.get("text") is not None:
            return _string(row["text"], where, "text")
    raise DataError(f"{where} has neither {COLUMNS}")


def texts_of(content: Content) -> Iterator[str]:
    """Every text in it, in order."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, PromptCompletion):
        yield from texts_of(content.prompt)
        yield from texts_of(content.completion)
    else:
        yield from (message["content"] for message in content)


def _pair(prompt: Any, completion: Any, where: str) -> PromptCompletion:
    if isinstance(prompt, str) and isinstance(completion, str):
        return PromptCompletion(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        return PromptCompletion(_messages(prompt, where, "prompt"), _messages(completion, where, "completion"))
    kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
    raise DataError(f"{where}: 'prompt' and 'completion' must both be strings, or both lists of messages, not {kinds}")


def _string(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {column!r} must be a string, not {type(value).__name__}")
    return value


def _messages(values: Any, where: str, column: str) -> tuple[Message, ...]:
    if not isinstance(values, list):
        raise DataError(f"{where}: {column!r} must be a list, not {type(values).__name__}")
    messages = []
    for index, message in enumerate(values):
        pair = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not all(isinstance(value, str) for value in pair):
            raise DataError(f"{where}: message {index} needs a 'role' and a 'content', both strings")
        messages.append({"role": str(pair[0]), "content": str(pair[1])})
    return tuple(messages)
