"""The wheel: all of odc is in it, and works without a clone."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import odc

ROOT = Path(__file__).parent.parent
USE = """
import json, pathlib, sys
import odc, odc.cli, odc.kernels
from odc.blocks import blocks_of
from odc.experiments import config
from odc.provenance import VERSION

home = pathlib.Path(odc.__file__).parent
assert home.parent == pathlib.Path(sys.argv[1]), f"imported from {home}"
assert pathlib.Path(odc.kernels.__file__).is_relative_to(home)
assert (home / "py.typed").exists()
print(VERSION, *sorted(str(one.relative_to(home)) for one in home.rglob("*.*") if one.suffix in (".json", ".toml")))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel that is built from what git tracks."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    names = [
        name for name in tracked.decode().split("\0") if name.startswith(("odc/", "triton_kernels/")) or "/" not in name
    ]
    for name in filter(None, names):
        place = source / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            place.symlink_to(os.readlink(ROOT / name))
        else:
            place.write_bytes((ROOT / name).read_bytes())
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, str(source), "-w", str(out)], check=True, capture_output=True)
    (wheel,) = out.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def test_everything_is_in_it(unpacked: Path) -> None:
    here = {str(one.relative_to(ROOT)) for one in (ROOT / "odc").rglob("*.py")}
    here |= {f"odc/kernels/{one.name}" for one in (ROOT / "triton_kernels").glob("*.py")}
    assert here <= {str(one.relative_to(unpacked)) for one in unpacked.rglob("*.py")}
    assert not [one.name for one in unpacked.iterdir() if one.name != "odc" and not one.name.endswith(".dist-info")]


def run(unpacked: Path, folder: Path, *command: str) -> str:
    """What Python prints that finds odc in the wheel alone."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    line = [sys.executable, *command]
    ran = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_it_works_without_a_clone(unpacked: Path, tmp_path: Path) -> None:
    version, *data = run(unpacked, tmp_path, "-c", USE, str(unpacked)).split()
    assert version == odc.__version__
    files = [one for one in (ROOT / "odc").rglob("*.*") if one.suffix in (".json", ".toml")]
    assert data == sorted(str(one.relative_to(ROOT / "odc")) for one in files)
    assert data, "configurations of the demo are data of the package"


def test_its_command_starts(unpacked: Path, tmp_path: Path) -> None:
    (entry,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "odc = odc.cli:main" in entry.read_text()
    assert "train" in run(unpacked, tmp_path, "-m", "odc", "--help")
