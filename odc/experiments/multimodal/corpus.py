"""A made-up corpus whose examples differ widely in which modalities they have: real files, drawn from a seed.

It imitates the mixture of OrchMLLM (section 3.1). Its losses mean nothing beyond being equal between arms.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odc.experiments.multimodal.media import RATE, pillow, soundfile

_WORDS = ("the", "a", "of", "and", "to", "in", "is", "small", "large", "red", "round", "old", "house", "river", "far")
#: Tasks and how often each is drawn.
TASKS = {"caption": 0.2, "compare": 0.1, "recognize": 0.25, "ask": 0.15, "chat": 0.3}


@dataclass(frozen=True)
class CorpusConfig:
    """How large and how skewed a corpus is.

    `side` (pixels), `seconds` and `words` are medians: of an image, a clip, a conversation without media. `spread` is
    the standard deviation of their logarithms. Clips are cut at `most_seconds`.
    """

    examples: int = 64
    side: int = 240
    seconds: float = 6.0
    words: int = 24
    spread: float = 0.6
    most_seconds: float = 24.0
    seed: int = 0


def write_corpus(folder: Path, config: CorpusConfig) -> Path:
    """Writes `corpus.jsonl` and the media files it names into `folder` (made if missing); returns the JSONL's path.

    The same config gives the same content. Raises OdcError naming the extra if Pillow or soundfile is missing.
    """
    draw = np.random.RandomState(config.seed % (1 << 32))  # it takes no larger one
    (folder / "media").mkdir(parents=True, exist_ok=True)
    names, shares = list(TASKS), list(TASKS.values())
    lines = []
    for number in range(config.examples):
        task = names[draw.choice(len(names), p=shares)]
        lines.append(json.dumps({"messages": _MAKERS[task](_Maker(folder, config, draw, number))}))
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@dataclass
class _Maker:
    """Makes the parts of one example."""

    folder: Path
    config: CorpusConfig
    draw: np.random.RandomState
    number: int
    made: int = 0

    def skewed(self, median: float) -> float:
        return float(median * np.exp(self.config.spread * self.draw.standard_normal()))

    def words(self, median: float) -> str:
        return " ".join(self.draw.choice(_WORDS, max(1, round(self.skewed(median)))))

    def image(self) -> dict[str, Any]:
        width, height = (max(16, round(self.skewed(self.config.side))) for _ in range(2))
        image = pillow("writing")
        coarse = self.draw.randint(0, 256, (5, 5, 3)).astype(np.uint8)
        name = self._name("png")
        image.fromarray(coarse).resize((width, height), image.Resampling.BICUBIC).save(self.folder / name)
        return {"type": "image", "image": name}

    def clip(self) -> tuple[dict[str, Any], float]:
        seconds = min(self.config.most_seconds, max(0.2, self.skewed(self.config.seconds)))
        library = soundfile("writing")
        time = np.arange(int(seconds * RATE)) / RATE
        pitch = self.draw.uniform(120, 900) * (1 + 0.2 * np.sin(2 * np.pi * self.draw.uniform(0.5, 3) * time))
        tone = 0.3 * np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
        name = self._name("flac")
        library.write(str(self.folder / name), tone + 0.01 * self.draw.standard_normal(len(time)), RATE)
        return {"type": "audio", "audio": name}, seconds

    def _name(self, ending: str) -> str:
        self.made += 1
        return f"media/{self.number:05d}-{self.made}.{ending}"


def _turns(question: list[dict[str, Any]], answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _caption(make: _Maker) -> list[dict[str, Any]]:
    return _turns([make.image(), _say("What is this?")], make.words(10))


def _compare(make: _Maker) -> list[dict[str, Any]]:
    images = [make.image() for _ in range(make.draw.randint(2, 5))]
    between = [part for image in images for part in (image, _say("and"))][:-1]
    return _turns([_say("Compare"), *between], make.words(15))


def _recognize(make: _Maker) -> list[dict[str, Any]]:
    clip, seconds = make.clip()
    return _turns([clip, _say("Write it down.")], make.words(2.5 * seconds))


def _ask(make: _Maker) -> list[dict[str, Any]]:
    return _turns([make.clip()[0], _say("?")], str(make.draw.choice(["yes", "no"])))


def _chat(make: _Maker) -> list[dict[str, Any]]:
    return _turns([_say(make.words(make.config.words / 3))], make.words(make.config.words))


_MAKERS = {"caption": _caption, "compare": _compare, "recognize": _recognize, "ask": _ask, "chat": _chat}
