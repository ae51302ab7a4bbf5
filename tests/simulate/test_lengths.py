"""Lengths: named distributions have the mean and cut they claim; files give back what they hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from odc.errors import ConfigError, DataError
from odc.simulate.lengths import NAMED, LengthSample, lengths_named


@pytest.mark.parametrize("name", NAMED)
def test_named_distributions_have_their_mean_and_cut(name: str) -> None:
    source = NAMED[name]
    drawn = source.draw(100_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(source.mean, rel=0.02)
    assert drawn.max() == source.longest
    assert drawn.min() >= 16
    cut = source.draw(1000, np.random.default_rng(0), 500)
    assert cut.max() == 500


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("5\n\n7\n")
    (tmp_path / "a.json").write_text("[5, 7]")
    (tmp_path / "a.jsonl").write_text('{"length": 5}\n{"input_ids": [1, 2, 3, 4, 5, 6, 7]}\n')
    for name in ("a.txt", "a.json", "a.jsonl"):
        assert lengths_named(str(tmp_path / name)) == LengthSample((5, 7))
    drawn = LengthSample((5, 7)).draw(100, np.random.default_rng(0), 6)
    assert set(drawn.tolist()) == {5, 6}


@pytest.mark.parametrize(
    "text", ["", "five", json.dumps({"text": "x"}), "0", f"[7, {2**63}]", "[1e400]", "[1.5]", '{"length": 1.5}']
)
def test_files_without_lengths(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"a\.jsonl"):
        lengths_named(str(path))


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ConfigError, match="longalign"):
        lengths_named("longalgin")
    with pytest.raises(ConfigError, match="longalign"):
        lengths_named("a" * 300)  # longer than the name of a file may be


def test_a_datasets_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the datasets extra: make test-integrations")
    datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]}).save_to_disk(str(tmp_path / "data"))
    assert lengths_named(str(tmp_path / "data")) == LengthSample((2, 1))
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="none is no folder that datasets' save_to_disk wrote whole"):
        lengths_named(str(tmp_path / "none"))


def test_of_a_datasets_folder_with_splits_train_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Table(dict):
        column_names = ("num_tokens",)

    splits = {"train": Table(num_tokens=[3, 4]), "test": Table(num_tokens=[9])}
    fake = SimpleNamespace(DatasetDict=type(splits), load_from_disk=lambda path: splits)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert lengths_named(str(tmp_path)) == LengthSample((3, 4))


def test_the_page_lists_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8")
    for name, source in NAMED.items():
        assert f"| `{name}` | {source.mean:,} | {source.longest:,} | {source.sigma} |" in page
