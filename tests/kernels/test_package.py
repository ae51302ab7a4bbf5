"""The kernels' folder is part of the package odc, and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_link_leads_to_the_folder() -> None:
    link = ROOT / "odc" / "kernels"
    assert link.is_symlink() and link.readlink() == Path("../triton_kernels")
    assert (link / "__init__.py").samefile(ROOT / "triton_kernels" / "__init__.py")


def test_it_is_installed_as_odc_kernels_alone() -> None:
    setuptools = pytest.importorskip("setuptools")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'include = ["odc", "odc.*"]' in project
    found = setuptools.find_packages(str(ROOT), include=["odc", "odc.*"])
    assert "odc.kernels" in found
    assert all(name == "odc" or name.startswith("odc.") for name in found)
