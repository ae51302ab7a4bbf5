from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from odc.cli import bench, main


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.thorough
def test_measures_saves_and_compares(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    path = tmp_path / "new" / "a.json"
    assert call("--quick", "--device", "cpu", "--only", "get,signal", "--sizes", "64K", "--json", str(path)) == 0
    captured = capfd.readouterr()
    assert "| get " in captured.out and "memcpy" in captured.out and str(path) in captured.out
    assert "odc bench: get, 2 ranks, 64 KiB" in captured.err
    rows = json.loads(path.read_text())["rows"]
    assert {row["what"] for row in rows} == {"get", "signal there and back"}
    assert call("--compare", str(path), str(path)) == 0
    assert "| get " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "got"], "odc: only: got is none of get, "),
        (["--ranks", "two"], "odc: ranks: whole numbers"),
        (["--ranks", "0"], "odc: ranks: at least 1"),
        (["--sizes", "64X"], "odc: sizes: bytes such as"),
        (["--sizes", "K"], "odc: sizes: bytes such as"),
        (["--sizes", "100"], "odc: sizes: multiples of 4096"),
        (["--device", "tpu"], "odc: device: cpu or cuda"),
        (["--compare", "nowhere.json", "nowhere.json"], "odc: compare: nowhere.json cannot be read"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capfd: pytest.CaptureFixture) -> None:
    assert call(*arguments) == 2
    said = capfd.readouterr().err
    assert message in said and "Traceback" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_who_knows_more(capfd: pytest.CaptureFixture) -> None:
    assert call("--device", "cuda") == 2
    assert "odc doctor" in capfd.readouterr().err


@pytest.mark.parametrize(("text", "size"), [("65536", 65536), ("64K", 65536), (" 1m", 1 << 20), ("2G", 2 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert bench._bytes(text) == size
