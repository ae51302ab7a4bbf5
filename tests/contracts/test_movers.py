"""Both movers do the same, and the one that cannot work here is refused before any work."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from support.on_ranks import on_interpreted_ranks

from odc import Settings, movers
from odc.errors import UnsupportedError
from odc.movers import cpu as cpu_mover
from odc.movers.choice import DataMover, mover_for

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")
NUMELS = [100, 1, 33]


def everything(mover: DataMover) -> list[torch.Tensor]:
    """All that the five functions write, from the same numbers."""
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, generator=draw) for n in NUMELS]
    published = [torch.zeros(200, dtype=dtype) for dtype in (BF16, F32, F16)]
    mover.publish([one[2 : 2 + n] for one, n in zip(published, NUMELS, strict=True)], parts)

    memory = [torch.randint(0, 256, (512,), generator=draw).to(torch.uint8) for _ in range(3)]
    outs = [torch.zeros(3 * n, dtype=dtype) for n, dtype in zip(NUMELS, (BF16, F32, F64), strict=True)]
    mover.gather(outs, [0, 208, 224], 3, [(1, memory[1]), (2, memory[2]), (0, memory[0])])

    slot = torch.zeros(64, dtype=torch.uint8)
    mover.put(slot.data_ptr() + 3, memory[0].data_ptr() + 5, 41)

    sums = [torch.randn(134, generator=draw).to(dtype) for dtype in (F32, F64)]
    for one in sums:
        places = list(one.split(NUMELS))[::-1]  # a unit's gradients come in any order
        values = [part.to(dtype) for part, dtype in zip(parts[::-1], (BF16, F32, F16), strict=True)]
        mover.add(places, values)
    return [*published, *(out.view(torch.uint8) for out in outs), slot, *sums]


@on_interpreted_ranks(1)
def test_kernels_do_the_same(rank: int, world: int) -> None:
    from odc.movers import triton as triton_mover

    assert mover_for(Settings(kernels="triton"), CPU) is triton_mover
    found, expected = everything(triton_mover), everything(cpu_mover)
    wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
    assert not wrong, f"results {wrong} differ"


def test_torch_is_the_default() -> None:
    assert mover_for(Settings(), CPU) is cpu_mover
    assert all(bool(one.count_nonzero()) for one in everything(cpu_mover)), "something was not written at all"


def test_compiled_kernels_are_refused_where_there_is_no_gpu() -> None:
    """In this process, where nothing is interpreted."""
    pytest.importorskip("triton", reason="needs triton: pip install 'odc-fsdp[kernels]'")
    if torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ:
        pytest.skip("kernels are usable here")
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
        mover_for(Settings(kernels="triton"), CPU)


def test_triton_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(movers, "triton", raising=False)
    monkeypatch.setitem(sys.modules, "odc.movers.triton", None)  # as if an import in it had failed
    with pytest.raises(UnsupportedError, match=r"odc-fsdp\[kernels\]"):
        mover_for(Settings(kernels="triton"), CPU)


def test_settings_refuse_other_kernels() -> None:
    with pytest.raises(ValueError, match="kernels must be one of auto, torch, triton, not 'cuda'"):
        Settings(kernels="cuda")  # type: ignore[arg-type]
