"""Folders of Hugging Face datasets, which the extra `datasets` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from odc.errors import DataError, install


def read_saved_dataset(path: Path) -> Any:
    """The data set in a folder that `datasets.save_to_disk` wrote; of several splits, `train`.

    Raises DataError if there is none, or `datasets` is missing.
    """
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError as error:
        raise DataError(f"reading the folder {path} needs datasets: {install('datasets')}") from error
    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no folder that datasets' save_to_disk wrote whole: {error}") from error
    if not isinstance(found, DatasetDict):
        return found
    if "train" not in found:
        raise DataError(f"{path} has no split 'train', only {', '.join(sorted(found))}")
    return found["train"]
