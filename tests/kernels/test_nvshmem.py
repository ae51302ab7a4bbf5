"""How launches choose NVSHMEM; that its calls compile and link is for test_compile. None of them runs here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.on_ranks import on_interpreted_ranks


@on_interpreted_ranks(1)
def test_a_branch_is_chosen(rank: int, world: int) -> None:
    from odc.kernels import Symmetric
    from odc.kernels.nvshmem import LIBRARY, options_for

    table = torch.zeros(2, dtype=torch.int64)
    assert options_for(table, None) == ((0, table), {"NVSHMEM": False})
    pes, library = torch.tensor([4, 7], dtype=torch.int32), Path("/somewhere/libnvshmem_device.bc")
    args, constants = options_for(table, Symmetric(64, pes, library))
    assert args == (64, pes)
    assert constants == {"NVSHMEM": True, "extern_libs": {LIBRARY: str(library)}}
    for wrong in (pes.long(), pes[:1]):
        with pytest.raises(ValueError, match=r"pes must be int32 \[2\] on cpu"):
            options_for(table, Symmetric(64, wrong, library))


@on_interpreted_ranks(1)
def test_the_device_library_is_found_or_named(rank: int, world: int, tmp_path: Path) -> None:
    from odc.errors import UnsupportedError
    from odc.kernels.nvshmem import LIBRARY, device_library

    path = tmp_path / "nvshmem" / "lib" / f"{LIBRARY}.bc"
    with pytest.MonkeyPatch.context() as patch:
        found = SimpleNamespace(submodule_search_locations=["/nowhere", str(tmp_path)])
        patch.setattr(importlib.util, "find_spec", lambda name: found)
        with pytest.raises(UnsupportedError, match=r"odc-fsdp\[bitcode\]"):
            device_library(90)
        path.parent.mkdir(parents=True)
        path.touch()
        assert device_library(90) == path
        for number in (75, 80, 100):  # as NVSHMEM 3.8 has them
            path.with_name(f"{LIBRARY}_sm_{number}.bc").touch()
        assert [device_library(number).stem for number in (75, 90, 103)] == [
            f"{LIBRARY}_sm_{number}" for number in (75, 80, 100)
        ]
        assert device_library(70) == path
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UnsupportedError, match="pip install"):
            device_library(90)
