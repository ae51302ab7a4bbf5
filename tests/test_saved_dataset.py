"""Folders that `datasets.save_to_disk` wrote, or did not, with a stand-in for the package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from odc.errors import DataError
from odc.saved_dataset import read_saved_dataset


def saved(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    """What `datasets` finds in any folder, or the error that it raises."""

    def load_from_disk(path: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    fake = SimpleNamespace(DatasetDict=dict, load_from_disk=load_from_disk)
    monkeypatch.setitem(sys.modules, "datasets", fake)


def test_of_a_saved_data_set_with_splits_train_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved(monkeypatch, ["row"])
    assert read_saved_dataset(tmp_path) == ["row"]
    saved(monkeypatch, {"train": ["row"], "test": []})
    assert read_saved_dataset(tmp_path) == ["row"]
    saved(monkeypatch, {"test": [], "dev": []})
    with pytest.raises(DataError, match="no split 'train', only dev, test"):
        read_saved_dataset(tmp_path)


@pytest.mark.parametrize("error", [FileNotFoundError("no"), KeyError("_data_files"), ValueError("no JSON")])
def test_a_folder_that_save_to_disk_did_not_write_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    saved(monkeypatch, error)
    with pytest.raises(DataError, match=f"{tmp_path} is no folder that datasets' save_to_disk wrote whole: "):
        read_saved_dataset(tmp_path)
