"""Compiles every kernel, for every GPU generation, without a GPU; prints what the tests want to know as JSON.

Run as a script by `test_compile`, in a process where nothing is interpreted:
`python compile_kernels.py <compute capability> first|others`; one line a kernel. "first" is every kernel once, for
peers with a pointer, and what those that call NVSHMEM are before anything is linked, their names after "calls";
"others" are all types, and the kernels that are linked with NVSHMEM's library, which takes half a minute.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from odc.errors import UnsupportedError
from odc.kernels.accumulate import accumulate_kernel
from odc.kernels.add import add_kernel
from odc.kernels.differ import differ_kernel
from odc.kernels.gather import gather_kernel
from odc.kernels.get import get_kernel
from odc.kernels.launch import OPTIONS, TILE_BYTES
from odc.kernels.nvshmem import LIBRARY, device_library
from odc.kernels.pack import elements_of_tile, pack_kernel
from odc.kernels.patch import patch_kernel
from odc.kernels.publish import publish_kernel
from odc.kernels.put import put_kernel
from odc.kernels.round import BLOCK, add_rounded_kernel, keep_kernel, round_kernel

#: Types of the kernels' arguments by name; what is not here is an int64.
TYPES = {
    **dict.fromkeys(("rows_at", "table", "targets", "sources"), "*i64"),
    **dict.fromkeys(("arrived", "pes", "found"), "*i32"),
    **dict.fromkeys(("first", "count", "shards", "blocks"), "i32"),
}


NUMBERS = (tl.float64, tl.float32, tl.float16, tl.bfloat16)
SUMS = (tl.float64, tl.float32)
Variant = tuple[str, Any, dict[str, Any]]


def movers(far: bool) -> Iterator[Variant]:
    """(name, kernel, constants) of copies and words, for peers with a pointer or far ones, by NVSHMEM."""
    copy = {"TO": tl.int16, "FROM": tl.int16, "BLOCK": TILE_BYTES // 2}
    words = {"WORD": tl.int16, "BLOCK": TILE_BYTES // 2}
    end = "-nvshmem" if far else ""
    yield f"get{end}", get_kernel, {**copy, "NVSHMEM": far}
    yield f"gather{end}", gather_kernel, {**copy, "NVSHMEM": far}
    yield f"put-signal{end}", put_kernel, {**words, "SIGNAL": True, "ONE": far, "NVSHMEM": far}
    yield f"put-many{end}", put_kernel, {**words, "SIGNAL": far, "ONE": False, "NVSHMEM": far}


def first() -> Iterator[Variant]:
    """Every kernel, for peers with a pointer."""
    yield from movers(far=False)
    halves, singles = TILE_BYTES // 2, TILE_BYTES // 4
    copy = {"TO": tl.int16, "FROM": tl.int16, "BLOCK": halves}
    cast = {"TO": tl.bfloat16, "FROM": tl.float32, "BLOCK": singles}
    widen = {"TO": tl.float32, "FROM": tl.bfloat16, "BLOCK": singles}
    yield "get-cast", get_kernel, {**cast, "NVSHMEM": False}
    yield "gather-cast", gather_kernel, {**cast, "NVSHMEM": False}
    yield "publish-cast", publish_kernel, cast
    yield "publish-copy", publish_kernel, copy
    yield "add-bf16", add_kernel, widen
    yield "add-fp64", add_kernel, {"TO": tl.float64, "FROM": tl.float32, "BLOCK": TILE_BYTES // 8}
    atomic = {**widen, "HOW": "atomic"}
    yield "accumulate-bf16", accumulate_kernel, atomic
    yield "accumulate-fp32", accumulate_kernel, {**atomic, "FROM": tl.float32}
    yield "accumulate-fp64", accumulate_kernel, {**atomic, "TO": tl.float64, "BLOCK": TILE_BYTES // 8}
    yield "accumulate-alone", accumulate_kernel, {**widen, "HOW": "add"}
    yield "scatter", accumulate_kernel, {**copy, "HOW": "copy"}
    yield "differ-cast", differ_kernel, cast
    yield "differ-same", differ_kernel, copy
    yield "pack-cast", pack_kernel, pack_tile(tl.bfloat16, tl.float32)
    yield "pack-same", pack_kernel, pack_tile(tl.int16, tl.int16)
    yield "pack-wide", pack_kernel, pack_tile(tl.int32, tl.int32)
    yield "patch", patch_kernel, {"WORD": tl.int16}
    blocks = {"BLOCKS": TILE_BYTES // 4 // BLOCK}
    yield "round", round_kernel, blocks
    yield "add-rounded", add_rounded_kernel, blocks
    yield "keep", keep_kernel, blocks


def others(library: str | None) -> Iterator[Variant]:
    """All words and pairs of types, and what is linked with the library."""
    for word in (tl.int8, tl.int16, tl.int32, tl.int64):
        yield f"publish {word}", publish_kernel, tile(word, word)
    for source, to in product(NUMBERS, repeat=2):
        if source != to:
            yield f"publish {source} {to}", publish_kernel, tile(to, source)
    for source, to in product(NUMBERS, SUMS):
        yield f"add {source} {to}", add_kernel, tile(to, source)
        yield f"accumulate {source} {to}", accumulate_kernel, {**tile(to, source), "HOW": "atomic"}
    for word in (tl.int8, tl.int16, tl.int32, tl.int64):
        yield f"pack {word}", pack_kernel, pack_tile(word, word)
    for source, to in product(NUMBERS, repeat=2):
        if source != to:
            yield f"pack {source} {to}", pack_kernel, pack_tile(to, source)
    yield "patch int8", patch_kernel, {"WORD": tl.int8}
    if library:
        yield from movers(far=True)


def pack_tile(to: Any, source: Any) -> dict[str, Any]:
    """As `tile`; a program packs as many elements as have a tile's words."""
    return {"TO": to, "FROM": source, "BLOCK": elements_of_tile(to.primitive_bitwidth // 8)}


def tile(to: Any, source: Any) -> dict[str, Any]:
    """Constants of a kernel that reads `source` and writes `to`."""
    return {"TO": to, "FROM": source, "BLOCK": TILE_BYTES * 8 // max(to.primitive_bitwidth, source.primitive_bitwidth)}


def compiled(kernel: Any, constants: dict[str, Any], capability: int, library: str | None) -> dict[str, Any]:
    """What there is to know about one kernel on one target."""
    options = dict(OPTIONS)
    if constants.get("NVSHMEM"):
        options["extern_libs"] = {LIBRARY: library}
    begin = time.perf_counter()
    source, signature = source_of(kernel, constants)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = found.asm["ptx"]
    accesses = Counter(re.findall(r"\b((?:ld|st|atom|red)(?:\.\w+)*\.global[.\w:]*)", ptx))
    return {
        "seconds": round(time.perf_counter() - begin, 2),
        "accesses": accesses,
        "local": ".local" in ptx,
        "stack": stack(found.asm["cubin"]),
        "sass": sass(found.asm["cubin"]) if not constants.get("NVSHMEM") else {},
        "shared": found.metadata.shared,
        "specialized": [p.name for p in kernel.params if not (p.is_constexpr or unspecialized(p, signature[p.name]))],
        "cubin": len(found.asm["cubin"]),
        **calls(found.asm["ttir"]),
        "linked": "nvshmemi_device_state_d" in ptx,
        "library": Path(library).name if library and constants.get("NVSHMEM") else "",
        "counts_behind_barrier": "st.global" not in ptx.partition("acq_rel")[0].rpartition("bar.sync")[2],
        "arithmetic": Counter(re.findall(r"\b((?:add|sub|mul|div|fma|rcp|max)\.[.\w]*f32\w*)", ptx)),
        "undefined": re.findall(r"\.extern \.func .*?(\w+)\s*\n?\s*\(", ptx),
    }


def source_of(kernel: Any, constants: dict[str, Any]) -> tuple[ASTSource, dict[str, str]]:
    """What triton compiles, and the types of its arguments by name."""
    names = list(inspect.signature(kernel.fn).parameters)
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i64") for name in names}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants), signature


class Stopped(Exception):
    """Its text is a kernel in Triton's first representation, after which the compiler does not go on."""


def before_linking(kernel: Any, constants: dict[str, Any], capability: int) -> dict[str, Any]:
    """What a kernel calls; it is not compiled any further."""

    def stop(module: object, *_: object) -> None:
        raise Stopped(str(module))

    CUDABackend.make_ttgir = staticmethod(stop)
    try:
        triton.compile(source_of(kernel, constants)[0], target=GPUTarget("cuda", capability, 32), options=dict(OPTIONS))
    except Stopped as stopped:
        return calls(str(stopped))
    raise AssertionError("triton's compiler has no such step any more")


def calls(ttir: str) -> dict[str, Any]:
    """Functions of NVSHMEM that are called, and those of them that more than the first thread calls."""
    called = sorted(set(re.findall(r'symbol = "(nvshmem\w+)"', ttir)))
    return {"calls": called, "by_every_thread": calls_of_every_thread(ttir)}


def unspecialized(parameter: Any, kind: str) -> bool:
    """Whether launches compile for any value of it what was compiled here."""
    return parameter.do_not_specialize and parameter.annotation_type == ("" if kind.startswith("*") else kind)


def stack(cubin: bytes) -> int:
    """Bytes a thread keeps in local memory: spilled registers among them, of which PTX knows nothing."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", printed)
    return sum(map(int, found))


def sass(cubin: bytes) -> dict[str, int]:
    """How often each instruction of the machine code reads or writes memory outside of the program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(knobs.nvidia.cuobjdump.path)
        path = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}  # it calls nvdisasm
        command = [str(tool), "-sass", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, env=path).stdout
    return Counter(re.findall(r"\b((?:LDG|STG|REDG?|ATOMG?|LDL|STL)\.[.\w]*)", printed))


def calls_of_every_thread(ttir: str) -> list[str]:
    """Functions of NVSHMEM that are called outside of branches of the first thread alone."""
    threads = re.findall(r'(%\w+) = tt\.elementwise_inline_asm "mov\.u32 \$0, %tid\.x;"', ttir)
    first = [test for test, of in re.findall(r"(%\w+) = arith\.cmpi eq, (%\w+), %c0_i32\b", ttir) if of in threads]
    branches: list[str] = []
    found = []
    for line in map(str.strip, ttir.splitlines()):
        if line.startswith("}"):
            branches.pop()
        if line.endswith("{"):
            branches.append((re.findall(r"scf\.if (%\w+)", line) or [""])[0])
        if not any(branch in first for branch in branches):
            found += re.findall(r'symbol = "(nvshmem\w+)"', line)
    return sorted(set(found))


def main() -> None:
    """Print one line for each kernel."""
    try:
        library = str(device_library(int(sys.argv[1])))
    except UnsupportedError as error:
        library = None
        print(json.dumps({"no_library": str(error)}))
    capability, which = int(sys.argv[1]), sys.argv[2]
    for name, kernel, constants in first() if which == "first" else others(library):
        facts = compiled(kernel, constants, capability, library)
        print(json.dumps({"kernel": name, "target": capability, **facts}), flush=True)
    for name, kernel, constants in movers(far=True) if library and which == "first" else ():
        print(json.dumps({"kernel": f"calls {name}", **before_linking(kernel, constants, capability)}), flush=True)


if __name__ == "__main__":
    main()
