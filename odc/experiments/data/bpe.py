"""Byte-level BPEs by the `tokenizers` package: plain bytes, and one that is trained once on the corpus and cached.

Ranks that start at once may each train; the first complete file wins and all load it. Its text is normalized (NFC) and
split by Qwen2's rules, because `AutoTokenizer` applies these wherever config.json names "qwen2".
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc.errors import DataError, install
from odc.experiments.data.chat import CHATML_TEMPLATE, END, START, Encoded, chatml, joined
from odc.experiments.data.sources import Message, PromptCompletion, RawDocument, texts_of

EOS = "<|endoftext|>"
SPECIALS = (EOS, START, END)
SMALLEST_VOCAB = 256 + len(SPECIALS)
_SPLIT = (  # Qwen2's
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": EOS,
    "pad_token": EOS,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHATML_TEMPLATE,
}
_VERSION = "bpe-2"  # part of the cached file's name: raise it when training changes


class BpeTokenizer:
    """A byte-level BPE with `SPECIALS` among its ids, by `rules` as in a tokenizer.json.

    It never reads special tokens out of texts. Texts are encoded in parallel over the machine's cores unless
    TOKENIZERS_PARALLELISM forbids it.
    """

    bos_id = None

    def __init__(self, rules: str) -> None:
        self._tokenizer = _tokenizers().Tokenizer.from_str(rules)
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = int(self._tokenizer.get_vocab_size())
        self.eos_id, self._start, self._end = (int(self._tokenizer.token_to_id(name)) for name in (EOS, START, END))
        self.ends = [self.eos_id, self._end]
        self.fingerprint = hashlib.sha256(rules.encode()).hexdigest()

    def encode(self, text: str) -> NDArray[np.int32]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encode_pair(self, prompt: str, completion: str) -> Encoded:
        return joined(list(zip(self.encode_many([prompt, completion]), (False, True), strict=True)))

    def encode_chat(self, messages: Sequence[Message], first: int = 0) -> Encoded:
        return chatml(messages, self.encode, self._start, self._end, first)

    def save(self, folder: Path) -> None:
        """Write the files of a Hugging Face tokenizer.

        Where config.json names "qwen2", `AutoTokenizer` composes characters (NFC); `load_tokenizer` follows the rules.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        (folder / "tokenizer_config.json").write_text(json.dumps(_CONFIG, indent=2), encoding="utf-8")


class ByteTokenizer(BpeTokenizer):
    """Every UTF-8 byte is its own token: ids 0 to 255 are bytes, 256 to 258 are `SPECIALS`. A BPE without merges."""

    vocab_size = SMALLEST_VOCAB

    def __init__(self) -> None:
        super().__init__(_byte_rules())
        self.fingerprint = "bytes-1"

    def encode_many(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """What the rules give, 300 times faster."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def cached_bpe(documents: Sequence[RawDocument], vocab_size: int, cache: Path) -> BpeTokenizer:
    """The BPE of `vocab_size` tokens (a tiny corpus may give fewer), from `cache` if it was trained before.

    The documents' contents and order decide. Several processes may call it at once; all get the same tokenizer. Raises
    DataError if `vocab_size` is too small, the cache cannot be written, or the `tokenizers` package is missing.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise DataError(f"a byte-level BPE needs a vocabulary of at least {SMALLEST_VOCAB}, not {vocab_size}")
    path = cache / f"{_VERSION}-{vocab_size}-{content_hash(documents)[:32]}.json"
    if not path.is_file():
        publish(path, _train(_texts(documents), vocab_size).encode())
    return BpeTokenizer(path.read_text(encoding="utf-8"))


def content_hash(documents: Sequence[RawDocument]) -> str:
    """SHA-256 of the documents' contents in order, as hex digits."""
    digest = hashlib.sha256()
    for document in documents:
        content = document.content
        if isinstance(content, PromptCompletion):
            text = json.dumps([content.prompt, content.completion])
        else:
            text = content if isinstance(content, str) else json.dumps(content)
        encoded = text.encode()
        digest.update(f"{type(document.content).__name__} {len(encoded)}\n".encode())
        digest.update(encoded)
    return digest.hexdigest()


def publish(path: Path, content: bytes) -> None:
    """Make `content` appear at `path` as a whole; a file that another process put there first stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as partial:
            partial.write(content)
            partial.flush()
            os.fsync(partial.fileno())
            with suppress(FileExistsError):
                os.link(partial.name, path)
    except OSError as error:
        raise DataError(f"cannot write to the cache {path.parent}: {error.strerror or error}") from error


def _texts(documents: Sequence[RawDocument]) -> Iterable[str]:
    for document in documents:
        yield from texts_of(document.content)


def _train(texts: Iterable[str], vocab_size: int) -> str:
    """The rules, as JSON text, of a BPE trained on `texts`; the same texts give the same rules."""
    tokenizers = _tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_SPLIT), behavior="isolated")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def _byte_rules() -> str:
    """The rules, as JSON text, of a BPE whose ids are bytes, each written as the character that GPT-2 gave it."""
    tokenizers = _tokenizers()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    printable = {ord(character) for character in alphabet if ord(character) < 256}
    others = (byte for byte in range(256) if byte not in printable)  # their characters follow those of all bytes
    vocab = {character: ord(character) if ord(character) < 256 else next(others) for character in alphabet}
    vocab |= {name: 256 + number for number, name in enumerate(SPECIALS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return str(tokenizer.to_str())


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(f"a BPE needs tokenizers: {install('train')}") from error
    return tokenizers
