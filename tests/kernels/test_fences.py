"""Whoever sees the word of a put sees its data: read at once by the kernel that polled, with no launch in between.

A second put, built of the same source with relaxed order, is what the test must catch. That takes a device on which a
put and a look run at the same time; here their logic is checked in the interpreter.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.on_ranks import on_interpreted_ranks

pytest.importorskip("triton", reason="needs triton: pip install 'odc-fsdp[kernels]'")

#: What makes a put's data visible before its word, and what stands there in the relaxed one.
FENCES = (('sem="release", scope="sys"', 'sem="relaxed", scope="sys"'), ('sem="acq_rel"', 'sem="relaxed"'))
BARRIER = "    tl.debug_barrier()  # the stores"


def relaxed_put(folder: Path) -> ModuleType:
    """`odc.kernels.put` without its fences."""
    from odc.kernels import put

    source = Path(str(sys.modules[put.__module__].__file__)).read_text()
    for strong, weak in FENCES:
        assert source.count(strong) == 1, f"the kernel has changed: {strong!r}"
        source = source.replace(strong, weak)
    assert source.count(BARRIER) == 1, "the kernel has changed: no barrier"
    path = folder / "relaxed_put.py"
    path.write_text(source.replace(BARRIER, "    # no barrier: the stores"))
    spec = importlib.util.spec_from_file_location("relaxed_put", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["relaxed_put"] = module
    spec.loader.exec_module(module)
    return module


def late_elements(module: ModuleType, device: torch.device, numel: int, rounds: int) -> int:
    """How many elements came after the word, over all rounds; on a device put and look run at the same time."""
    from support.look_kernel import look_and_read

    slot, word = torch.zeros(numel, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    seen, arrived = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    table, at = torch.tensor([slot.data_ptr()]).to(device), word.data_ptr() - slot.data_ptr()

    def put(value: int) -> None:
        values = [torch.full_like(slot, value)]
        module.put(values, table, 0, signal=module.Signal(at, value, arrived))

    late = 0
    for value in range(1, rounds + 1):
        if device.type == "cpu":
            put(value)
            look_and_read(word, value, slot, seen, looks=2)
        else:
            if value == 1:
                put(0)  # compiled and loaded before a look that lasts
            torch.cuda.synchronize(device)
            putting, looking = torch.cuda.Stream(device), torch.cuda.Stream(device)
            with torch.cuda.stream(looking):
                look_and_read(word, value, slot, seen, looks=1_000_000)
            with torch.cuda.stream(putting):
                put(value)
            torch.cuda.synchronize(device)
        assert int(seen[0]) == value, "the look gave up: put and look did not run at the same time"
        late += int(seen[1])
    return late


@pytest.mark.thorough
@on_interpreted_ranks(1)
def test_this_test_in_the_interpreter(rank: int, world: int, tmp_path: Path) -> None:
    from support.look_kernel import look_and_read

    from odc.kernels import put

    cpu = torch.device("cpu")
    for module in (sys.modules[put.__module__], relaxed_put(tmp_path)):
        assert late_elements(module, cpu, 20_000, 2) == 0
    seen = torch.zeros(2, dtype=torch.int64)
    slot = torch.full((20_000,), 5, dtype=torch.int32)
    slot[[-1, -7, -16_384, -16_385]] = 4
    look_and_read(torch.tensor([5]), 5, slot, seen, looks=1)
    assert seen.tolist() == [5, 3], "three of the last 16,384 elements are late"
    look_and_read(torch.tensor([4]), 5, slot, seen, looks=1)
    assert seen.tolist()[0] == 4, "the look gave up"


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
def test_no_element_comes_after_the_word(cuda: torch.device) -> None:
    from odc.kernels import put

    assert late_elements(sys.modules[put.__module__], cuda, 8 << 20, 50) == 0


@pytest.mark.gpu
def test_a_put_without_fences_is_caught(cuda: torch.device, tmp_path: Path) -> None:
    if not late_elements(relaxed_put(tmp_path), cuda, 8 << 20, 200):
        pytest.xfail("200 puts without fences showed nothing on this device: what the test above shows is as little")
