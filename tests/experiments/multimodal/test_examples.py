"""Reading examples: lengths from headers, ChatML around interleaved parts, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from support.tiny_multimodal import CONFIG, CORPUS

from odc.errors import DataError
from odc.experiments.multimodal.corpus import TASKS, write_corpus
from odc.experiments.multimodal.examples import Media, Text, read_examples
from odc.experiments.multimodal.inputs import decode, rows
from odc.experiments.multimodal.media import audio_frames, image_grid, log_mel, patches

GEOMETRY = CONFIG.geometry


def write(folder: Path, *contents: Any, answer: str = "yes") -> Path:
    path = folder / "data.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}
        for content in contents
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def image(folder: Path, width: int, height: int) -> dict[str, str]:
    Image.new("RGB", (width, height), (10, 200, 30)).save(folder / f"{width}x{height}.png")
    return {"type": "image", "image": f"{width}x{height}.png"}


def clip(folder: Path, seconds: float, rate: int = 16_000) -> dict[str, str]:
    name = f"{seconds}-{rate}.wav"
    soundfile.write(str(folder / name), np.zeros(int(seconds * rate)), rate)
    return {"type": "audio", "audio": name}


def test_parts_lie_in_reading_order(tmp_path: Path) -> None:
    stated = {"type": "text", "text": "or"}
    path = write(tmp_path, [image(tmp_path, 24, 16), stated, clip(tmp_path, 0.5)])
    (example,) = read_examples(path, GEOMETRY, max_tokens=500)
    kinds = [part.modality if isinstance(part, Media) else "text" for part in example.parts]
    assert kinds == ["text", "image", "text", "audio", "text"]
    picture, sound = example.media("image")[0], example.media("audio")[0]
    assert (picture.size, picture.encoded, picture.length) == ((4, 6), 24, 6)
    assert (sound.size, sound.encoded, sound.length) == ((50,), 25, 13)
    assert example.length == sum(part.length for part in example.parts)
    assert example.label_tokens == len("yes") + 1  # and the mark that ends the turn
    texts = [part for part in example.parts if isinstance(part, Text)]
    written = bytes(token for text in texts for token in text.tokens if token < 256).decode()
    assert written == "user\nor\nassistant\nyes"


def test_lengths_are_what_decoding_gives(tmp_path: Path) -> None:
    for example in read_examples(write_corpus(tmp_path, CORPUS), GEOMETRY, max_tokens=5000):
        for item in [*example.media("image"), *example.media("audio")]:
            decoded = decode(item, GEOMETRY)
            assert decoded.dtype == torch.float32 and len(decoded) == rows(item)
            assert bool(torch.isfinite(decoded).all())


def test_corpus_is_the_same_from_the_same_seed_and_incoherent(tmp_path: Path) -> None:
    one, two = write_corpus(tmp_path / "1", CORPUS), write_corpus(tmp_path / "2", CORPUS)
    assert one.read_text() == two.read_text()
    examples = read_examples(one, GEOMETRY, max_tokens=5000)
    assert len(examples) == CORPUS.examples and abs(sum(TASKS.values()) - 1) < 1e-9
    for modality in ("image", "audio"):
        has = [bool(example.media(modality)) for example in examples]  # type: ignore[arg-type]
        assert any(has) and not all(has)


def test_a_seed_of_a_job_may_be_larger_than_32_bits(tmp_path: Path) -> None:
    paths = [write_corpus(tmp_path / str(seed), replace(CORPUS, seed=seed)) for seed in (1 << 32, (1 << 32) + 1)]
    assert paths[0].read_text() != paths[1].read_text()


def test_patches_keep_blocks_together(tmp_path: Path) -> None:
    """Every 2 x 2 block of patches lies in four rows on end: painted one value a block, rows agree by fours."""
    pixels = np.zeros((16, 24, 3), np.uint8)
    for block, (row, column) in enumerate((r, c) for r in range(2) for c in range(3)):
        pixels[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 40 * block
    Image.fromarray(pixels).save(tmp_path / "blocks.png")
    found = patches(tmp_path / "blocks.png", (4, 6), patch=4, merge=2)
    assert found.shape == (24, 48)
    first = found[:, 0].reshape(6, 4)
    assert (first == first[:, :1]).all() and (np.diff(first[:, 0]) > 0).all()


def test_large_images_shrink_to_the_cap_and_keep_their_shape(tmp_path: Path) -> None:
    image(tmp_path, 400, 100)
    rows_, columns = image_grid(tmp_path / "400x100.png", 8, 1600)
    assert rows_ * columns * 64 <= 1600 and columns > 2 * rows_


@pytest.mark.parametrize(("width", "height"), [(3000, 3), (3, 3000), (3000, 20), (20, 3000)])
def test_thin_images_shrink_to_the_cap(tmp_path: Path, width: int, height: int) -> None:
    image(tmp_path, width, height)
    rows_, columns = image_grid(tmp_path / f"{width}x{height}.png", 8, 1600)
    assert (rows_, columns) == ((1, 25) if width > height else (25, 1))


def test_mel_is_whispers(tmp_path: Path) -> None:
    """Away from the clip's ends, where padding differs, frames equal those of transformers' own extractor."""
    from transformers import WhisperFeatureExtractor

    draw = np.random.RandomState(0)
    samples = (0.1 * draw.standard_normal(16_000)).astype(np.float32)
    soundfile.write(str(tmp_path / "noise.wav"), samples, 16_000, subtype="FLOAT")
    mine = log_mel(tmp_path / "noise.wav", 80)
    theirs = WhisperFeatureExtractor()(samples, sampling_rate=16_000)["input_features"][0].T
    assert mine.shape == (100, 80)
    np.testing.assert_allclose(mine[3:-3], theirs[3:97], atol=2e-3)


REFUSED = [
    (lambda f: [{"type": "video", "video": "x"}], "type 'video'"),
    (lambda f: [{"type": "image", "image": "none.png"}], "none.png"),
    (lambda f: [{"type": "audio", "audio": "none.wav"}], "none.wav"),
    (lambda f: [clip(f, 0.5, 8000)], "8000 samples a second"),
    (lambda f: [clip(f, 3.0)], "at most 2.0 s"),
    (lambda f: "x" * 600, "over the cap"),
    (lambda f: 7, "not an example"),
    (lambda f: "half a pair \ud83d", "not an example: UnicodeEncodeError"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_bad_examples_are_refused_by_line(tmp_path: Path, content: Any, message: str) -> None:
    path = write(tmp_path, "fine", content(tmp_path))
    with pytest.raises(DataError, match=r"data.jsonl:2.*" + message):
        read_examples(path, GEOMETRY, max_tokens=500)


def test_an_example_without_an_answer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    with pytest.raises(DataError, match="nothing|assistant"):
        read_examples(tmp_path / "data.jsonl", GEOMETRY, max_tokens=500)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'{"messages": "caf\xe9"}')
    with pytest.raises(DataError, match=r"data\.jsonl is not UTF-8"):
        read_examples(tmp_path / "data.jsonl", GEOMETRY, max_tokens=500)


def test_an_undecodable_image_is_named(tmp_path: Path) -> None:
    image(tmp_path, 24, 16)
    whole = (tmp_path / "24x16.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut.png"):
        patches(tmp_path / "cut.png", (4, 6), patch=4, merge=2)


def test_an_image_that_pillow_takes_for_a_bomb_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image(tmp_path, 30, 20)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 250)
    with pytest.raises(DataError, match=r"30x20\.png: Image size \(600 pixels\) exceeds limit"):
        image_grid(tmp_path / "30x20.png", 8, 1600)


def test_a_clip_that_is_not_as_long_as_its_header_says_is_named(tmp_path: Path) -> None:
    """As a compressed file whose end is missing."""
    path = write(tmp_path, [clip(tmp_path, 0.5)])
    (item,) = read_examples(path, GEOMETRY, max_tokens=500)[0].media("audio")
    soundfile.write(str(item.path), np.zeros(4800), 16_000)
    with pytest.raises(DataError, match=r"0\.5-16000\.wav is damaged: it decodes to 0\.3 s, not to the 0\.5 s"):
        decode(item, GEOMETRY)


def test_frames_are_counted_from_the_header(tmp_path: Path) -> None:
    clip(tmp_path, 1.234)
    assert audio_frames(tmp_path / "1.234-16000.wav") == 123 == len(log_mel(tmp_path / "1.234-16000.wav", 8))
