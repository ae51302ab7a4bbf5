"""From a job's options to its tokenized documents, and the order in which minibatches draw them.

Both are the same on every rank without communication: every rank reads the data itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc.errors import DataError
from odc.experiments.config import JobConfig
from odc.experiments.data.bpe import ByteTokenizer, cached_bpe
from odc.experiments.data.documents import Document, load_documents
from odc.experiments.data.sources import RawDocument, read_source, source_named
from odc.experiments.data.tokenizer import Tokenizer, load_tokenizer
from odc.experiments.progress import Progress

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Dataset:
    """Documents within the cap, for training and for validation, and the tokenizer that made them."""

    documents: list[Document]
    tokenizer: Tokenizer
    valid: list[Document] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return [len(document) for document in self.documents]

    @property
    def vocab_size(self) -> int:
        """Number of ids up to the largest that documents hold, or with which the tokenizer ends them."""
        return 1 + max([*self.tokenizer.ends, *(int(one.tokens.max()) for one in [*self.documents, *self.valid])])


def load_dataset(config: JobConfig, progress: Progress) -> Dataset:
    """Reads, tokenizes and caps the job's data; shows on `progress` what it does. Local; nothing synchronizes.

    Raises `DataError` naming the file or document that cannot be used.
    """
    raw = _raw(config.data, progress)
    unseen = _raw(config.valid, progress) if config.valid is not None else []
    cache = cache_folder(config)
    progress.phase(f"tokenizing {len(raw) + len(unseen)} documents")
    tokenizer = _tokenizer(config, raw, cache)
    documents, valid = (
        load_documents(some, tokenizer, max_tokens=most, long=config.long, cache=cache) if some else []
        for some, most in ((raw, config.longest), (unseen, config.max_tokens))  # nothing is split in validation
    )
    return Dataset(documents, tokenizer, valid)


def _raw(name: str, progress: Progress) -> list[RawDocument]:
    progress.phase(f"reading {name}")
    return read_source(source_named(name), unreadable="skip" if name == "stdlib" else "error")


def cache_folder(config: JobConfig) -> Path:
    """Where tokenizers and ids are kept: the config's, or `~/.cache/odc`."""
    return Path(config.cache) if config.cache is not None else Path.home() / ".cache" / "odc"


def _tokenizer(config: JobConfig, raw: list[RawDocument], cache: Path) -> Tokenizer:
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    folder = Path(config.model)
    if config.tokenizer == "auto" and any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return load_tokenizer(folder)
    if config.tokenizer in ("auto", "bpe"):
        return cached_bpe(raw, config.vocab, cache)
    return load_tokenizer(Path(config.tokenizer))


class MinibatchSampler:
    """Endless minibatches of sample indices in shuffled epochs, the same on every rank.

    The order is a function of seed and epoch alone, so the whole state is one counter. Minibatches run across the end
    of an epoch: no sample is left out, and one minibatch may hold the same sample twice.
    """

    def __init__(self, documents: int, minibatch_size: int, seed: int = 0) -> None:
        if documents < 1:
            raise DataError("there are no documents to draw minibatches from")
        if minibatch_size < 1:
            raise DataError(f"minibatch_size must be at least 1, not {minibatch_size!r}")
        self._documents = documents
        self._minibatch_size = minibatch_size
        self._seed = seed
        self._drawn = 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        indices = [self._at(position) for position in range(self._drawn, self._drawn + self._minibatch_size)]
        self._drawn += self._minibatch_size
        return indices

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "documents": self._documents, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the samples that `state` had drawn; the minibatch size may have changed.

        Raises DataError if the number of documents or the seed differs.
        """
        for name, own in (("documents", self._documents), ("seed", self._seed)):
            if state[name] != own:
                raise DataError(f"the checkpoint was made with {name}={state[name]}, this job has {name}={own}")
        self._drawn = int(state["drawn"])

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self._documents)
        if self._order is None or self._order[0] != epoch:
            # numpy promises never to change what RandomState draws; other generators may change between versions.
            bits = np.random.MT19937(np.random.SeedSequence([self._seed, epoch]))
            self._order = (epoch, np.random.RandomState(bits).permutation(self._documents))
        return int(self._order[1][offset])
