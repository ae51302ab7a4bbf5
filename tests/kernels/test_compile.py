"""Every kernel compiles for three GPU generations without a GPU, to the instructions it was written for.

The tests read the PTX: a hint that is lost turns 16 bytes an instruction into 2, and a scope that is lost makes an
atomic add wrong between GPUs; neither fails to compile. Nothing here has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import distributions
from typing import Any, Literal

import pytest
from support.compiled import facts

pytest.importorskip("triton", reason="needs triton: pip install 'odc-fsdp[kernels]'")
TARGETS = (pytest.param(80, marks=pytest.mark.thorough), 90, pytest.param(100, marks=pytest.mark.thorough))

COPIES = (
    "get",
    "gather",
    "put-signal",
    "put-many",
    "get-cast",
    "gather-cast",
    "publish-cast",
    "publish-copy",
    "scatter",
)
COMPARES = ("differ-cast", "differ-same")
CHANGES = ("pack-cast", "pack-same", "pack-wide", "patch")
ROUNDS = ("round", "add-rounded", "keep")
ADDS = ("add-bf16", "add-fp64", "accumulate-alone", "accumulate-bf16", "accumulate-fp32", "accumulate-fp64")
NUMBERS = ("fp64", "fp32", "fp16", "bf16")
EVERY_TYPE = {
    *(f"publish {word}" for word in ("int8", "int16", "int32", "int64")),
    *(f"publish {source} {to}" for source in NUMBERS for to in NUMBERS if source != to),
    *(f"{kernel} {source} {to}" for kernel in ("add", "accumulate") for source in NUMBERS for to in ("fp64", "fp32")),
}
EVERY_CHANGE = {
    "patch int8",
    *(f"pack {word}" for word in ("int8", "int16", "int32", "int64")),
    *(f"pack {source} {to}" for source in NUMBERS for to in NUMBERS if source != to),
}
CALLS = {
    "get-nvshmem": ["nvshmemx_getmem_block"],
    "gather-nvshmem": ["nvshmemx_getmem_block"],
    "put-signal-nvshmem": ["nvshmemx_putmem_signal_block"],
    "put-many-nvshmem": ["nvshmem_quiet", "nvshmemx_putmem_block", "nvshmemx_signal_op"],
}


def accesses(target: int, kernel: str) -> dict[str, int]:
    found: dict[str, int] = facts(target)[kernel]["accesses"]
    return found


def becomes_good_machine_code(built: dict[str, dict[str, Any]]) -> None:
    """Without local memory, and the same for any value of an argument. NVSHMEM's library from 3.8 on, which is a file
    for each architecture, asserts and prints with memory of its own.
    """
    assert all(one["cubin"] > 1000 for one in built.values())
    ours = {name: one for name, one in built.items() if one["library"] in ("", "libnvshmem_device.bc")}
    assert not [name for name, one in ours.items() if one["local"] or one["stack"] or one["undefined"]]
    undefined = {name for one in built.values() for name in one["undefined"]}
    assert undefined <= {"__assertfail", "vprintf"}, "CUDA defines these two"
    assert not {name: one["specialized"] for name, one in built.items() if one["specialized"]}


def built(target: int, which: Literal["first", "others"] = "first") -> dict[str, dict[str, Any]]:
    """What has become machine code."""
    return {name: one for name, one in facts(target, which).items() if not name.startswith(("no_library", "calls "))}


def need_library(which: Literal["first", "others"]) -> None:
    """Skip the test where NVSHMEM's device library is not installed, which CI does not allow."""
    if "no_library" in facts(90, which):
        pytest.skip(facts(90, which)["no_library"]["no_library"])


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_becomes_machine_code_for_any_argument_without_local_memory(target: int) -> None:
    assert built(target).keys() == {*COPIES, *ADDS, *COMPARES, *CHANGES, *ROUNDS}
    becomes_good_machine_code(built(target))
    assert not [name for name, one in built(target).items() if one["linked"] or one["calls"]]


# The test above compiles every kernel, and test_gpu converts between all types in the interpreter;
# `test_nvshmem_is_called_for_peers_without_a_pointer` looks at every kernel that calls it. The other types are compiled
# for Hopper alone: that each generation converts and adds is shown by the kernels of the first test.
@pytest.mark.thorough
def test_every_type_becomes_machine_code_too() -> None:
    found = {name: one for name, one in built(90, "others").items() if name not in CALLS}
    assert found.keys() == EVERY_TYPE | EVERY_CHANGE
    becomes_good_machine_code(found)
    stays_with_its_thread(90, EVERY_TYPE, found)
    assert not [name for name, one in found.items() if one["linked"] or one["calls"]]


@pytest.mark.thorough
def test_what_is_linked_with_nvshmem_becomes_machine_code_too() -> None:
    """With the library of the wheel that is installed: one file up to 3.7, then one for each architecture."""
    need_library("others")
    found = {name: built(90, "others")[name] for name in CALLS}
    becomes_good_machine_code(found)
    assert all(one["linked"] for one in found.values())
    assert {name: one["calls"] for name, one in found.items()} == CALLS
    release = next(one.version for one in distributions() if one.name.startswith("nvidia-nvshmem-cu"))
    whole = tuple(map(int, release.split(".")[:2])) < (3, 8)
    assert {one["library"] for one in found.values()} == {f"libnvshmem_device{'' if whole else '_sm_90'}.bc"}


@pytest.mark.parametrize("target", TARGETS)
def test_whole_blocks_are_read_and_written_16_bytes_at_a_time(target: int) -> None:
    for kernel in COPIES:
        found = accesses(target, kernel)
        assert found["ld.global.v4.b32"] >= 4 and found["st.global.v4.b32"] >= 4, f"{kernel}: {found}"
    # A thread reads the elements that it adds to: 16 bytes of sums, or one fp64, which are added atomically one by one.
    for kernel, read in zip(ADDS, ("v2.b32", "v2.b32", "v2.b32", "v2.b32", "v4.b32", "b16"), strict=True):
        found = accesses(target, kernel)
        assert found[f"ld.global.{read}"] >= 8, f"{kernel}: {found}"
        if kernel.startswith("add") or kernel.endswith("alone"):
            wide = {name for name in found if name.endswith((".v4.b32", ".v2.b64"))}
            assert {name[:2] for name in wide} == {"ld", "st"}, f"{kernel}: {found}"
            assert min(found[name] for name in wide) >= 8, f"{kernel}: {found}"


def test_machine_code_moves_16_bytes_at_a_time_and_adds_four_numbers_at_once() -> None:
    """PTX is a wish: this is what a Hopper runs."""
    for kernel in ("get", "gather", "scatter", "publish-copy", "put-signal"):
        found = facts(90)[kernel]["sass"]
        assert found["LDG.E.128"] >= 8 and found["STG.E.128"] >= 8, f"{kernel}: {found}"
    for kernel in ("accumulate-bf16", "accumulate-fp32"):
        found = facts(90)[kernel]["sass"]
        assert found["REDG.E.ADD.F32x4.FTZ.RN.STRONG.SYS"] >= 8, f"{kernel}: {found}"
    assert facts(90)["differ-cast"]["sass"]["LDG.E.128"] >= 8
    for kernel, one in facts(90).items():
        spilled = {name for name in one.get("sass", {}) if name.startswith(("LDL", "STL"))}
        assert not spilled, f"{kernel} spills: {spilled}"


@pytest.mark.parametrize("target", TARGETS)
def test_published_bytes_are_compared_where_they_lie(target: int) -> None:
    """Read 16 bytes at a time; all that is stored is the word of what was found."""
    for kernel in COMPARES:
        found = accesses(target, kernel)
        assert found["ld.global.v4.b32"] >= 8, f"{kernel}: {found}"
        stores = {name: count for name, count in found.items() if name.startswith(("st", "atom", "red"))}
        assert stores == {"st.global.b32": 1}, f"{kernel}: {found}"
        assert facts(target)[kernel]["shared"] <= 64, "what the warps found, and no element"


@pytest.mark.parametrize("target", TARGETS)
def test_changes_take_16_bytes_at_a_time_and_one_atomic_addition_of_a_program(target: int) -> None:
    for kernel in CHANGES:
        found = accesses(target, kernel)
        assert found["ld.global.v4.b32"] >= 2 and found["st.global.v4.b32"] == 2, f"{kernel}: {found}"
        atomics = {name: count for name, count in found.items() if name.startswith(("atom", "red"))}
        assert atomics == ({} if kernel == "patch" else {"atom.global.gpu.relaxed.add.u32": 1}), f"{kernel}: {found}"
        assert facts(target)[kernel]["shared"] <= 16 << 10, "of 227 KiB, for prefix sums and codes of eight words"


@pytest.mark.parametrize("target", TARGETS)
def test_sums_are_rounded_with_the_arithmetic_of_the_cpu(target: int) -> None:
    """Each operation rounds to nearest by itself, and nothing subnormal is flushed; 16 bytes are moved at a time."""
    exact = {"round": {"div", "mul", "add"}, "add-rounded": {"mul", "add"}, "keep": {"mul", "sub"}}
    for kernel, operations in exact.items():
        one = facts(target)[kernel]
        found = {name.removesuffix("x2") for name in one["arithmetic"]}  # Blackwell's take two numbers at once
        assert found == {f"{name}.rn.f32" for name in operations}, f"{kernel}: {one['arithmetic']}"
        wide = {name: count for name, count in one["accesses"].items() if name.endswith("v4.b32")}
        assert wide["st.global.v4.b32"] >= 4 and wide["ld.global.v4.b32"] >= 4, f"{kernel}: {wide}"
        assert one["shared"] <= 4096, "of 227 KiB: what 16 bytes of 2-byte elements change threads through"


@pytest.mark.parametrize("target", TARGETS)
def test_elements_stay_with_their_thread(target: int) -> None:
    """Through shared memory they would pass it twice, with barriers in between."""
    stays_with_its_thread(target, {*COPIES, *ADDS} - {"put-signal"}, facts(target))
    assert facts(target)["put-signal"]["shared"] <= 16  # its count goes to all threads


def stays_with_its_thread(target: int, names: Iterable[str], found: dict[str, dict[str, Any]]) -> None:
    built = {name for name in names if found[name]["shared"]}
    if target < 90:  # fp32 is added one by one there, and triton 3.9 gives neighbours to neighbouring threads for it
        built = {name for name in built if not name.startswith("accumulate")}
    assert not built


@pytest.mark.parametrize("target", TARGETS)
def test_gradients_are_added_atomically_for_the_whole_system(target: int) -> None:
    for kernel in ("accumulate-bf16", "accumulate-fp32", "accumulate-fp64"):
        found = accesses(target, kernel)
        atomics = {name for name in found if name.startswith(("atom", "red"))}
        assert all(".sys.relaxed.add." in name for name in atomics), f"{kernel}: {found}"
        assert not [name for name in found if name.startswith("st")], f"{kernel} stores past its atomic adds: {found}"
        if kernel.endswith("fp64"):
            assert {name.rsplit(".", 1)[1] for name in atomics} == {"f64"}
        else:
            wide = any(name.endswith("add.v4.f32") for name in atomics)
            assert wide == (target >= 90), f"{kernel}: {found}"


@pytest.mark.parametrize("target", TARGETS)
def test_words_are_released_for_the_whole_system(target: int) -> None:
    assert "atom.global.sys.release.exch.b64" in accesses(target, "put-signal")
    assert "atom.global.gpu.acq_rel.add.u32" in accesses(target, "put-signal")
    assert facts(target)["put-signal"]["counts_behind_barrier"], "a program counts itself before it has stored all"
    assert not [name for name in accesses(target, "put-many") if name.startswith(("atom", "red"))]


def test_nvshmem_is_called_for_peers_without_a_pointer() -> None:
    need_library("first")
    # Before the target makes a difference.
    found = {name.removeprefix("calls "): one for name, one in facts(90).items() if name.startswith("calls ")}
    assert {name: one["calls"] for name, one in found.items()} == CALLS
    # What a whole program calls together; anything else would be done once by each of its threads.
    together = {"nvshmemx_getmem_block", "nvshmemx_putmem_block", "nvshmemx_putmem_signal_block", "nvshmem_quiet"}
    assert {name for one in found.values() for name in one["by_every_thread"]} == together
