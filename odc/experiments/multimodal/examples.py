"""Examples: interleaved text, images and audio of one conversation, and minibatches of them.

The format is Hugging Face's (`content` is a text, or a list of `{"type": "text" | "image" | "audio"}` parts), turns are
written in ChatML. Lengths come from file headers, which every rank reads. Media are never trained on.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from odc.errors import DataError
from odc.experiments.data.bpe import ByteTokenizer
from odc.experiments.multimodal.media import audio_frames, image_grid
from odc.experiments.multimodal.model import TowerGeometry

Modality = Literal["image", "audio"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)
Phase = Literal["image", "audio", "llm"]
PHASES: Final[tuple[Phase, ...]] = (*MODALITIES, "llm")


@dataclass(frozen=True, eq=False)
class Text:
    """A run of text tokens: `tokens` int32 [length]; `trained` bool [length], targets of the loss."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Media:
    """One image or audio clip.

    `size` is what its encoder gets: (rows, columns) of patches, or (frames,) of the log-mel spectrogram. `encoded` is
    its length in the encoder (patches, or positions after the convolutions), `length` that in the language model.
    """

    modality: Modality
    path: Path
    size: tuple[int, ...]
    encoded: int
    length: int


@dataclass(frozen=True, eq=False)
class Example:
    """One training example, named `file.jsonl:line`: text runs and media in the order the language model reads them."""

    name: str
    parts: tuple[Text | Media, ...]

    @property
    def length(self) -> int:
        return sum(part.length for part in self.parts)

    @property
    def label_tokens(self) -> int:
        """Targets of the loss; the first position never is one."""
        return int(self.labels_mask()[1:].sum())

    def media(self, modality: Modality) -> list[Media]:
        return [part for part in self.parts if isinstance(part, Media) and part.modality == modality]

    def labels_mask(self) -> NDArray[np.bool_]:
        """Bool [length]: which positions are targets."""
        masks = [p.trained if isinstance(p, Text) else np.zeros(p.length, np.bool_) for p in self.parts]
        return np.concatenate(masks)


@dataclass(frozen=True)
class ExampleBatch:
    """The examples of one optimizer step: `drawn` [ranks] lists those of each rank.

    Items (examples in the phase `llm`, else images or clips) are numbered rank by rank, example by example.
    """

    drawn: Sequence[Sequence[Example]]

    @property
    def examples(self) -> list[Example]:
        return [example for mine in self.drawn for example in mine]

    def media(self, modality: Modality) -> list[Media]:
        return [media for example in self.examples for media in example.media(modality)]

    def lengths(self, phase: Phase) -> list[list[int]]:
        """[ranks] length, inside the phase's own model, of each item that a rank drew."""
        if phase == "llm":
            return [[example.length for example in mine] for mine in self.drawn]
        return [[item.encoded for example in mine for item in example.media(phase)] for mine in self.drawn]

    @property
    def label_tokens(self) -> int:
        return sum(example.label_tokens for example in self.examples)

    @property
    def tokens(self) -> int:
        return sum(example.length for example in self.examples)


def deal(examples: Sequence[Example], ranks: int) -> ExampleBatch:
    """Gives consecutive examples to each rank, as if each had drawn its own; the first may get one more."""
    share, more = divmod(len(examples), ranks)
    ends = [share * (rank + 1) + min(rank + 1, more) for rank in range(ranks)]
    return ExampleBatch([examples[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)])


def read_examples(path: Path, geometry: TowerGeometry, *, max_tokens: int) -> list[Example]:
    """The examples of a JSONL file of `messages`, in its order. Reads headers of media files, decodes none.

    Media paths are relative to the file's folder; `max_tokens` caps the length of one example. Raises DataError naming
    the line for what is malformed, missing, over the cap, or has nothing to train on.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8") from error
    examples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name = f"{path.name}:{number}"
        try:
            fields = json.loads(line)
            messages = fields["messages"]
            if not isinstance(messages, list):
                raise TypeError("messages is not a list")
            parts = tuple(_merged(_parts(messages, path.parent, geometry)))
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            if isinstance(error, DataError):
                raise DataError(f"{name}: {error}") from error
            raise DataError(f"{name} is not an example: {type(error).__name__}: {error}") from error
        example = Example(name, parts)
        if not example.parts:
            raise DataError(f"{name} has no assistant's turn to train on")
        if example.length > max_tokens:
            raise DataError(f"{name} is {example.length} positions long, over the cap of {max_tokens} (max_tokens)")
        examples.append(example)
    if not examples:
        raise DataError(f"{path} holds no examples")
    return examples


def _parts(messages: Sequence[dict[str, Any]], folder: Path, geometry: TowerGeometry) -> Iterator[Text | Media]:
    """The conversation in ChatML, part by part; what follows the last assistant's turn is cut."""
    last = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    for at, message in enumerate(messages[: last + 1]):
        answer = message["role"] == "assistant"
        yield _text([_START], f"{message['role']}\n", trained=False)
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                yield _text([], part["text"], trained=answer)
            elif part["type"] in MODALITIES:
                yield _media(part["type"], folder / part[part["type"]], geometry)
            else:
                raise DataError(f"a part of type {part['type']!r}; there are text, image and audio")
        yield Text(np.array([_END], np.int32), np.array([answer]))
        if at < last:
            yield _text([], "\n", trained=False)


@functools.cache
def _tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


def _text(before: list[int], text: str, *, trained: bool) -> Text:
    tokens = np.concatenate([np.array(before, np.int32), _tokenizer().encode(text)])
    return Text(tokens, np.full(len(tokens), trained))


def _media(modality: Modality, path: Path, geometry: TowerGeometry) -> Media:
    if modality == "image":
        rows, columns = image_grid(path, geometry.patch * geometry.merge, geometry.max_pixels)
        size = rows * geometry.merge, columns * geometry.merge
        return Media(modality, path, size, size[0] * size[1], rows * columns)
    frames = audio_frames(path)
    encoded = geometry.audio_positions(frames)
    if encoded > geometry.most_positions:
        raise DataError(
            f"{path} is {frames / 100:.1f} s long; the encoder takes at most {geometry.most_positions / 50:.1f} s"
        )
    return Media(modality, path, (frames,), encoded, geometry.audio_tokens(encoded))


def _merged(parts: Iterator[Text | Media]) -> Iterator[Text | Media]:
    """Joins neighbouring texts, so that an example has as few parts as it can."""
    for _, run in groupby(parts, type):
        group = list(run)
        texts = [part for part in group if isinstance(part, Text)]
        if texts:
            yield Text(np.concatenate([t.tokens for t in texts]), np.concatenate([t.trained for t in texts]))
        else:
            yield from group


_START, _END = 257, 258  # of ByteTokenizer
