"""Conversations as tokens: the assistant's words and the mark that ends them are trained on, the rest is context.

With a chat template, the trained part is found by rendering every prefix of the conversation: a template that rewrites
earlier turns is refused. Without a template conversations are written in ChatML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from odc.errors import DataError
from odc.experiments.data.sources import Message

Encoded = tuple[NDArray[np.int32], NDArray[np.bool_]]

START, END = "<|im_start|>", "<|im_end|>"
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chatml(
    messages: Sequence[Message], encode: Callable[[str], NDArray[np.int32]], start: int, end: int, first: int = 0
) -> Encoded:
    """Tokens of a conversation in ChatML, and which of them are trained on; what follows the last trained one is cut.

    `encode` reads no special tokens out of a text; `start` and `end` are the ids of `<|im_start|>` and `<|im_end|>`.
    Messages before number `first` are context, of any role.
    """
    pieces: list[tuple[Sequence[int] | NDArray[np.int32], bool]] = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant" and turn >= first:
            pieces.append(([start, *encode("assistant\n")], False))
            pieces.append(([*encode(message["content"]), end], True))
        else:
            pieces.append(([start, *encode(f"{message['role']}\n{message['content']}"), end], False))
        pieces.append((encode("\n"), False))
    return _joined(pieces)


def by_template(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message], bool], str],
    encode: Callable[[str], NDArray[np.int32]],
    first: int = 0,
) -> Encoded:
    """The same by a chat template. `encode` reads special tokens out of a text; `render` takes messages and whether to
    ask for an answer. Raises DataError if a turn changes how the turns before it are rendered.
    """
    pieces: list[tuple[NDArray[np.int32], bool]] = []
    done = ""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn < first:
            continue
        asked, answered = render(messages[:turn], True), render(messages[: turn + 1], False)
        if not (asked.startswith(done) and answered.startswith(asked)):
            raise DataError(f"the chat template renders earlier turns differently once message {turn} follows")
        answer = answered[len(asked) :].rstrip()
        pieces.append((encode(asked[len(done) :]), False))
        pieces.append((encode(answer), True))
        done = asked + answer
    return _joined(pieces)


def _joined(pieces: Sequence[tuple[Sequence[int] | NDArray[np.int32], bool]]) -> Encoded:
    last = max((at for at, (_, trained) in enumerate(pieces) if trained), default=-1)
    kept = pieces[: last + 1]
    if not kept:
        return np.zeros(0, np.int32), np.zeros(0, np.bool_)
    tokens = np.concatenate([np.asarray(ids, np.int32) for ids, _ in kept])
    return tokens, np.concatenate([np.full(len(ids), trained, np.bool_) for ids, trained in kept])
