"""Tokenized documents under a cap: what planners plan and microbatches are packed from.

A sample is a whole document: attention stays inside it, so its length is its cost. Ids are cached beside tokenizers.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from odc.errors import DataError
from odc.experiments.config import Long
from odc.experiments.data.bpe import content_hash, publish
from odc.experiments.data.chat import Encoded
from odc.experiments.data.sources import Content, Message, PromptCompletion, RawDocument
from odc.experiments.data.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Document:
    """One sample; the pieces of a split document have names that end in `#0`, `#1`, ...

    `tokens` are int32 [length]; `trained`, bool [length], marks the targets of the loss. The first never is one.
    """

    name: str
    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def label_tokens(self) -> int:
        return int(self.trained.sum())


def load_documents(
    raw: Sequence[RawDocument],
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    long: Long = "error",
    cache: Path | None = None,
) -> list[Document]:
    """The documents of `raw`, tokenized and within the cap of `max_tokens` (at least 2), in their order.

    A document over the cap is an error naming it, is split (`long`) into pieces that overlap by one token, so that each
    target stays in exactly one piece, or is dropped. `cache` is a folder that keeps the ids; processes may share it.
    The log counts what is split, dropped, or left out for want of a target (one token, no assistant). Raises DataError
    for bad data and if nothing is left.
    """
    if max_tokens < 2:
        raise DataError(f"max_tokens must be at least 2, not {max_tokens!r}: a document of one token has no target")
    if not raw:
        raise DataError("there are no documents")
    encoded = _encoded(raw, tokenizer, cache)
    documents = [Document(r.name, tokens, trained) for r, (tokens, trained) in zip(raw, encoded, strict=True)]
    fitting = _within_cap(documents, max_tokens, long)
    useful = [document for document in fitting if document.label_tokens]
    if len(useful) < len(fitting):
        _log.info("left out %d documents or pieces without a target of the loss", len(fitting) - len(useful))
    if not useful:
        raise DataError(f"none of {len(raw)} documents is left to train on (cap {max_tokens} tokens, long={long!r})")
    return useful


def _within_cap(documents: Sequence[Document], max_tokens: int, long: Long) -> list[Document]:
    over = [document for document in documents if len(document) > max_tokens]
    if not over:
        return list(documents)
    worst = max(over, key=len)
    named = f"{worst.name} has {len(worst)} tokens, more than the cap of {max_tokens}"
    others = f"; so have {len(over) - 1} others" if len(over) > 1 else ""
    if long == "error":
        raise DataError(f"document {named}{others}. Raise the cap, or choose to split or drop long documents")
    _log.warning("%s %d of %d documents over the cap: %s%s", long, len(over), len(documents), named, others)
    if long == "drop":
        return [document for document in documents if len(document) <= max_tokens]
    return [piece for document in documents for piece in _pieces(document, max_tokens)]


def _pieces(document: Document, max_tokens: int) -> list[Document]:
    """Pieces of at most `max_tokens`; each begins with the last token of the one before it, no longer as a target."""
    if len(document) <= max_tokens:
        return [document]
    pieces = []
    for number, start in enumerate(range(0, len(document) - 1, max_tokens - 1)):
        part = slice(start, start + max_tokens)
        trained = document.trained[part].copy()
        trained[0] = False
        pieces.append(Document(f"{document.name}#{number}", document.tokens[part], trained))
    return pieces


def _encoded(raw: Sequence[RawDocument], tokenizer: Tokenizer, cache: Path | None) -> list[Encoded]:
    if cache is None:
        return _encode(raw, tokenizer)
    key = hashlib.sha256(f"{content_hash(raw)} {tokenizer.fingerprint} ids-2".encode()).hexdigest()
    path = cache / f"ids-{key[:32]}.npz"
    if not path.is_file():
        fresh = _encode(raw, tokenizer)
        buffer = io.BytesIO()
        np.savez(
            buffer,
            lengths=np.asarray([len(tokens) for tokens, _ in fresh], np.int64),
            tokens=np.concatenate([tokens for tokens, _ in fresh]),
            trained=np.concatenate([trained for _, trained in fresh]),
        )
        publish(path, buffer.getvalue())
        return fresh
    with np.load(path, allow_pickle=False) as stored:
        cuts = np.cumsum(stored["lengths"])[:-1]
        return list(zip(np.split(stored["tokens"], cuts), np.split(stored["trained"], cuts), strict=True))


def _encode(raw: Sequence[RawDocument], tokenizer: Tokenizer) -> list[Encoded]:
    texts = iter(tokenizer.encode_many([one.content for one in raw if isinstance(one.content, str)]))
    encoded: list[Encoded] = []
    for document in raw:
        try:
            tokens, trained = _encode_one(document.content, tokenizer, texts)
        except DataError as error:
            raise DataError(f"{document.name}: {error}") from error
        trained[:1] = False
        encoded.append((tokens, trained))
    return encoded


def _encode_one(content: Content, tokenizer: Tokenizer, texts: Iterator[NDArray[np.int32]]) -> Encoded:
    """Chats follow the tokenizer's template; of a prompt and its completion only the completion is trained.

    The next of `texts` are the ids of `content` if it is a text.
    """
    if isinstance(content, str):
        tokens = next(texts)
        trained = np.ones(len(tokens), np.bool_)
    elif isinstance(content, PromptCompletion) and isinstance(content.prompt, str):
        assert isinstance(content.completion, str)
        tokens, trained = tokenizer.encode_pair(content.prompt, content.completion)
    else:
        context, answers = _turns(content)
        return tokenizer.encode_chat((*context, *answers), len(context))
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    tokens = np.concatenate([np.asarray(begin, np.int32), tokens, np.asarray([tokenizer.eos_id], np.int32)])
    return tokens, np.concatenate([np.zeros(len(begin), np.bool_), trained, np.ones(1, np.bool_)])


def _turns(content: Content) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The messages that are context, of any role, and those whose answers are trained."""
    if isinstance(content, tuple):
        return (), content
    assert isinstance(content, PromptCompletion) and isinstance(content.prompt, tuple)
    assert isinstance(content.completion, tuple)
    return content.prompt, content.completion
