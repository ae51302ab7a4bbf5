"""Conversations as tokens: the assistant's words and the mark that ends them are trained on, the rest is context.

With a chat template, the trained part is found by rendering every prefix of the conversation: a template that rewrites
earlier turns is refused. Without a template conversations are written in ChatML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from odc.errors import DataError
from odc.experiments.data.sources import Message

Encoded = tuple[NDArray[np.int32], NDArray[np.bool_]]
#: Ids [tokens] of a text and, [tokens, 2], its characters from and to which each goes; None where that is not known.
Located = tuple[NDArray[np.int32], NDArray[np.int64] | None]

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
    return joined(pieces)


def by_template(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message], bool], str],
    encode: Callable[[str], Located],
    first: int = 0,
) -> Encoded:
    """The same by a chat template. `encode` reads special tokens out of a text; `render` takes messages and whether to
    ask for an answer. Raises DataError if a turn changes how the turns before it are rendered, and as `marked` does.
    """
    answers: list[tuple[int, int]] = []
    done = ""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn < first:
            continue
        asked, answered = render(messages[:turn], True), render(messages[: turn + 1], False)
        if not (asked.startswith(done) and answered.startswith(asked)):
            raise DataError(f"the chat template renders earlier turns differently once message {turn} follows")
        done = asked + answered[len(asked) :].rstrip()
        answers.append((len(asked), len(done)))
    return marked(done, answers, encode)


def marked(text: str, answers: Sequence[tuple[int, int]], encode: Callable[[str], Located]) -> Encoded:
    """Tokens of `text`, and which of them are trained on: those that begin within `answers`, places of characters.

    The text is tokenized as a whole: many tokenizers begin a text, or go on after a special token, in a way of their
    own. Where a token would straddle the begin of an answer, the text is cut: when a model generates, its prompt ends
    there. Raises DataError if the tokenizer locates no tokens and a cut at every answer changes them.
    """
    if not answers:
        return joined([])
    whole = encode(text)
    ids, spans = whole
    if spans is None:
        edges = [0, *(edge for answer in answers for edge in answer)]
        pieces = [(encode(text[start:end])[0], bool(at % 2)) for at, (start, end) in enumerate(pairwise(edges))]
        tokens, trained = joined(pieces)
        if not np.array_equal(tokens, ids):
            raise DataError(
                "an answer alone has other tokens than within its text, and the tokenizer does not say where tokens "
                "lie: take one with a tokenizer.json"
            )
        return tokens, trained
    cuts = [begin for begin, _ in answers if ((spans[:, 0] < begin) & (begin < spans[:, 1])).any()]
    edges = [0, *cuts, len(text)]
    parts = [encode(text[start:end]) for start, end in pairwise(edges)] if cuts else [whole]
    found = [own[:, 0] + edge for (_, own), edge in zip(parts, edges, strict=False) if own is not None]
    starts = np.concatenate(found)
    trained = np.zeros(len(starts), np.bool_)
    for begin, end in answers:
        trained |= (begin <= starts) & (starts < end)
    return np.concatenate([part for part, _ in parts]), trained


def joined(pieces: Sequence[tuple[Sequence[int] | NDArray[np.int32], bool]]) -> Encoded:
    """One after the other, each trained on or not; what follows the last trained one is cut."""
    last = max((at for at, (_, trained) in enumerate(pieces) if trained), default=-1)
    kept = pieces[: last + 1]
    if not kept:
        return np.zeros(0, np.int32), np.zeros(0, np.bool_)
    tokens = np.concatenate([np.asarray(ids, np.int32) for ids, _ in kept])
    return tokens, np.concatenate([np.full(len(ids), trained, np.bool_) for ids, trained in kept])
