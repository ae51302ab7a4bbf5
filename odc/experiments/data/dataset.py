"""From a job's config to tokenized documents, the same on every rank.

Chose to let every rank read the data itself, from a cache that the launching process has filled, over sending it: no
rank waits for another, and data that cannot be used is refused before any rank starts. The cost is one copy of the ids
per rank (4 bytes a token) and reading the raw texts once more for their hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from odc.experiments.config import JobConfig
from odc.experiments.data.bpe import cached_bpe
from odc.experiments.data.documents import Document, load_documents
from odc.experiments.data.sources import RawDocument, read_source, source_named
from odc.experiments.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from odc.experiments.progress import Progress

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Dataset:
    """Documents within the cap and the tokenizer that made them."""

    documents: list[Document]
    tokenizer: Tokenizer

    @property
    def lengths(self) -> list[int]:
        """Tokens of every document."""
        return [len(document) for document in self.documents]


def load_dataset(config: JobConfig, progress: Progress) -> Dataset:
    """Reads, tokenizes and caps the job's data; says on `progress` what it does. Local; nothing synchronizes.

    Raises `DataError` naming the file or document that cannot be used.
    """
    progress.phase(f"reading {config.data}")
    raw = read_source(source_named(config.data), unreadable="skip" if config.data == "stdlib" else "error")
    cache = cache_folder(config)
    progress.phase(f"tokenizing {len(raw)} documents")
    tokenizer = _tokenizer(config, raw, cache)
    documents = load_documents(raw, tokenizer, max_tokens=config.max_tokens, long=config.long, cache=cache)
    return Dataset(documents, tokenizer)


def cache_folder(config: JobConfig) -> Path:
    """Where tokenizers and ids are kept: the config's, or `~/.cache/odc`."""
    return Path(config.cache) if config.cache is not None else Path.home() / ".cache" / "odc"


def _tokenizer(config: JobConfig, raw: list[RawDocument], cache: Path) -> Tokenizer:
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    folder = Path(config.model)
    if config.tokenizer == "auto" and any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return load_tokenizer(folder)
    return cached_bpe(raw, config.vocab, cache)
