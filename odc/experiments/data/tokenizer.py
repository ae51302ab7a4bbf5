"""Tokenizers behind one small protocol, and whatever a Hugging Face folder holds as one (`bpe` makes the others).

Text is never searched for special tokens, so a document that happens to spell `<|endoftext|>` does not end there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from odc.errors import DataError, install
from odc.experiments.data.chat import Encoded, Located, by_template, marked
from odc.experiments.data.sources import Message

_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes without rules of their own


class Tokenizer(Protocol):
    """What the job needs of a tokenizer. Any process may use one; nothing synchronizes."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""

    @property
    def eos_id(self) -> int:
        """The id that ends a document."""

    @property
    def ends(self) -> list[int]:
        """`eos_id`, and the special token with which the chat template ends an answer, if it is another."""

    @property
    def bos_id(self) -> int | None:
        """The id that begins a document, None where there is none."""

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give equal ids; part of cached files' names."""

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids [tokens] of `text`, without anything added."""

    def encode_many(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """`encode` of each text, several at a time where that is faster."""

    def encode_pair(self, prompt: str, completion: str) -> Encoded:
        """Ids [tokens] of a prompt and its completion, and that the completion is trained on [tokens]; adds nothing."""

    def encode_chat(self, messages: Sequence[Message], first: int = 0) -> Encoded:
        """Ids [tokens] of a conversation and which of them are trained on [tokens]: the assistants' words from message
        number `first` on; empty without any.
        """

    def save(self, folder: Path) -> None:
        """Write the files from which `transformers.AutoTokenizer` loads the same tokenizer; makes the folder."""


class HfTokenizer:
    """A tokenizer loaded by `transformers.AutoTokenizer`; special tokens spelled in a text are read as text."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer in {name} has no end-of-text token (eos_token)")
        self.vocab_size = len(tokenizer)
        self.eos_id = int(tokenizer.eos_token_id)
        added = tokenizer("")["input_ids"]
        self.bos_id = int(added[0]) if added and added[0] == tokenizer.bos_token_id else None
        self._name = name

    @property
    def fingerprint(self) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend else json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        special = json.dumps(self._tokenizer.special_tokens_map, sort_keys=True, default=str)
        known = f"{rules}\n{self._tokenizer.chat_template}\n{special}\n{self.bos_id} {self.eos_id}"
        return hashlib.sha256(known.encode()).hexdigest()

    @property
    def ends(self) -> list[int]:
        special = {number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        try:
            answers = [
                [{"role": "user", "content": "?"}, {"role": "assistant", "content": one}] for one in ("yes", "no")
            ]
            last = {int(self.encode_chat(one)[0][-1]) for one in answers}
        except DataError:  # no template, or one that wants other messages
            last = set()
        return [self.eos_id, *(last & special - {self.eos_id} if len(last) == 1 else ())]

    def encode(self, text: str) -> NDArray[np.int32]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return self._ids(texts, special=False)

    def encode_pair(self, prompt: str, completion: str) -> Encoded:
        text = prompt + completion
        return marked(text, [(len(prompt), len(text))], lambda part: self._located(part, special=False))

    def encode_chat(self, messages: Sequence[Message], first: int = 0) -> Encoded:
        """The conversation by the tokenizer's own chat template; DataError if it has none or it fails."""
        if not self._tokenizer.chat_template:
            raise DataError(
                f"the data holds messages, but the tokenizer in {self._name} has no chat template: put one into that "
                "folder (chat_template.jinja), or give the rows as texts"
            )
        return by_template(messages, self._render, lambda text: self._located(text, special=True), first)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(str(folder))

    def _render(self, messages: Sequence[Message], ask: bool) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask))
        except (TemplateError, ValueError, IndexError) as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error

    def _ids(self, texts: Sequence[str], *, special: bool) -> list[NDArray[np.int32]]:
        if not texts:
            return []  # transformers' tokenizers raise IndexError for an empty batch
        return [np.asarray(row, np.int32) for row in self._call(texts, special)["input_ids"]]

    def _located(self, text: str, *, special: bool) -> Located:
        if not getattr(self._tokenizer, "is_fast", False):
            return self._ids([text], special=special)[0], None
        found = self._call([text], special, return_offsets_mapping=True)
        spans = np.asarray(found["offset_mapping"][0], np.int64).reshape(-1, 2)
        return np.asarray(found["input_ids"][0], np.int32), spans

    def _call(self, texts: Sequence[str], special: bool, **wanted: bool) -> Any:
        return self._tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=not special,
            return_attention_mask=False,
            verbose=False,
            **wanted,
        )


def load_tokenizer(folder: Path) -> HfTokenizer:
    """The tokenizer in a Hugging Face folder; DataError if there is none or `transformers` is missing.

    A folder that names no class of its own is read by its tokenizer.json, which `AutoTokenizer` would at times replace.
    """
    if not (folder / "tokenizer_config.json").is_file() and not (folder / "tokenizer.json").is_file():
        raise DataError(f"{folder} holds no tokenizer (tokenizer.json or tokenizer_config.json)")
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise DataError(f"loading a tokenizer needs transformers: {install('train')}") from error
    try:
        loader = PreTrainedTokenizerFast if _is_plain(folder) else AutoTokenizer
        tokenizer = loader.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    return HfTokenizer(tokenizer, str(folder))


def _is_plain(folder: Path) -> bool:
    """Whether tokenizer.json is the whole tokenizer, by the class that the folder names."""
    config = folder / "tokenizer_config.json"
    if not config.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    fields = json.loads(config.read_text(encoding="utf-8"))
    return isinstance(fields, dict) and fields.get("tokenizer_class") in _PLAIN
