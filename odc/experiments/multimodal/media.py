"""Files to what the encoders take: images to patches by Pillow, audio to log-mel frames by soundfile.

The layouts are those of Qwen2-VL and Whisper, without padding. A clip at another rate than 16 kHz is refused.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc.errors import DataError, OdcError, install

RATE = 16_000  # samples a second
_WINDOW, _HOP = 400, 160  # samples: 25 ms every 10 ms
# Per channel, of the images CLIP was trained on; the values that Qwen2-VL's processor uses.
_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
_DEVIATION = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)

Array = NDArray[np.float32]


def image_grid(path: Path, unit: int, max_pixels: int) -> tuple[int, int]:
    """(rows, columns) of `unit` x `unit` pixel squares that an image is resized to; reads the header only.

    The nearest multiples of `unit`, at least 1, scaled down where there would be more than `max_pixels` pixels.
    """
    with _open_image(path) as image:
        width, height = image.size
    rows, columns = max(1, round(height / unit)), max(1, round(width / unit))
    if rows * columns * unit * unit > max_pixels:
        shrink, most = math.sqrt(height * width / max_pixels), max(1, max_pixels // unit**2)
        rows = min(most, max(1, math.floor(height / shrink / unit)))
        columns = min(most // rows, max(1, math.floor(width / shrink / unit)))
    return rows, columns


def patches(path: Path, size: tuple[int, int], *, patch: int, merge: int) -> Array:
    """An image as patches, [rows * columns, 3 * patch * patch] fp32, normalised.

    `size` is (rows, columns), multiples of `merge`. The order is that of `merge` x `merge` blocks, row by row, as
    Qwen2-VL's tower expects.
    """
    rows, columns = size
    with _open_image(path) as image:
        try:
            pixels = np.asarray(image.convert("RGB").resize((columns * patch, rows * patch)), np.float32)
        except OSError as error:
            raise DataError(f"{path} cannot be decoded: {error}") from error
    pixels = (pixels / 255.0 - _MEAN) / _DEVIATION
    blocks = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    return np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns, 3 * patch * patch)


def audio_frames(path: Path) -> int:
    """Frames of the spectrogram of an audio file, 100 a second, at least 1; reads the header only."""
    library = soundfile("reading")
    try:
        facts = library.info(str(path))
    except library.LibsndfileError as error:
        raise DataError(f"audio {path}: {error}") from error
    if facts.samplerate != RATE:
        raise DataError(f"{path} has {facts.samplerate} samples a second; resample it to {RATE}")
    if not facts.frames:
        raise DataError(f"{path} is empty")
    return max(1, int(facts.frames) // _HOP)


def log_mel(path: Path, bins: int) -> Array:
    """An audio file as Whisper's log-mel spectrogram, [frames, bins] fp32, of the mean of its channels."""
    library = soundfile("reading")
    try:
        samples, _ = library.read(str(path), dtype="float32", always_2d=True)
    except library.LibsndfileError as error:
        raise DataError(f"{path} cannot be decoded: {error}") from error
    count = max(1, len(samples) // _HOP)
    mono = np.pad(samples.mean(axis=1), _WINDOW // 2 + _WINDOW)  # silence around it, enough for every window
    starts = np.arange(count) * _HOP + _WINDOW
    windows = np.lib.stride_tricks.sliding_window_view(mono, _WINDOW)[starts] * np.hanning(_WINDOW + 1)[:-1]
    power = np.abs(np.fft.rfft(windows, axis=1)) ** 2
    scale = np.log10(np.maximum(power @ _filters(bins), 1e-10))
    mel: Array = ((np.maximum(scale, scale.max() - 8.0) + 4.0) / 4.0).astype(np.float32)
    return mel


@functools.cache
def _filters(bins: int) -> NDArray[np.float64]:
    from transformers.audio_utils import mel_filter_bank

    made: NDArray[np.float64] = mel_filter_bank(
        num_frequency_bins=_WINDOW // 2 + 1,
        num_mel_filters=bins,
        min_frequency=0.0,
        max_frequency=RATE / 2,
        sampling_rate=RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    return made


def _open_image(path: Path) -> Any:
    library = pillow("reading")
    try:
        return library.open(path)
    except (OSError, library.DecompressionBombError) as error:
        raise DataError(f"image {path}: {error}") from error


def pillow(doing: str) -> Any:
    """Pillow's `Image`; raises OdcError naming the extra if it is missing."""
    try:
        from PIL import Image
    except ImportError as error:
        raise OdcError(f"{doing} images needs Pillow: {install('multimodal')}") from error
    return Image


def soundfile(doing: str) -> Any:
    """The package; raises OdcError naming the extra if it, or libsndfile, is missing."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise OdcError(f"{doing} audio needs soundfile: {install('multimodal')}") from error
    return soundfile
