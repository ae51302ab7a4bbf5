"""What a GPU does without Triton and torch: a gather in CUDA C++ and the runtime's plain copies, by CuPy.

For `bench.one_gpu --only cupy`: the gather does what odc's kernel does, in as few blocks, and what the kernel lacks of
its rate is what Triton loses. CuPy compiles it by NVRTC, so that no nvcc is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from odc.errors import OdcError, install

THREADS, TILE_WORDS = 128, 1024  # of a block; 16 bytes each, as in a program of odc's kernel: 16 KiB
#: Blocks of all owners at one place of the unit follow each other, as in `odc.kernels.gather`.
GATHER = r"""
extern "C" __global__ void gather(uint4* target, const unsigned long long* owners, long long words, int count) {
    const long long tiles = (words + TILE - 1) / TILE;
    for (long long item = blockIdx.x; item < tiles * count; item += gridDim.x) {
        const int owner = (int)(item % count);
        const long long begin = item / count * TILE;
        const uint4* source = (const uint4*)owners[owner];
        #pragma unroll
        for (int step = 0; step < TILE; step += THREADS) {
            const long long at = begin + step + threadIdx.x;
            if (at < words) target[owner * words + at] = source[at];
        }
    }
}
"""
OPTIONS = (f"-DTILE={TILE_WORDS}", f"-DTHREADS={THREADS}")
_DEVICE_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice


def load() -> Any:
    """CuPy; OdcError, naming the extra, where it is not installed."""
    try:
        import cupy
    except ImportError as error:
        raise OdcError(f"the baselines of CUDA C++ need CuPy: {install('cupy')}") from error
    return cupy


def baselines(
    target: torch.Tensor, source: torch.Tensor, owners: torch.Tensor, blocks: int
) -> dict[str, Callable[[], object]]:
    """Ways to fill `target` from `source`, of as many bytes, in torch's current stream; by name.

    `owners`: int64 [count] on the device, where `source` is cut into as many equal pieces of whole 16 bytes.
    """
    cupy = load()
    kernel = cupy.RawKernel(GATHER, "gather", options=OPTIONS)
    runtime, count = cupy.cuda.runtime, owners.numel()
    words, device = target.nbytes // 16 // count, target.device.index or 0

    def stream() -> int:
        return torch.cuda.current_stream(target.device).cuda_stream if target.is_cuda else 0

    def gather() -> None:
        arguments = target.data_ptr(), owners.data_ptr(), cupy.int64(words), cupy.int32(count)
        with cupy.cuda.ExternalStream(stream()):
            kernel((blocks,), (THREADS,), arguments)

    def copy() -> None:
        runtime.memcpyAsync(target.data_ptr(), source.data_ptr(), target.nbytes, _DEVICE_TO_DEVICE, stream())

    def copy_peer() -> None:
        runtime.memcpyPeerAsync(target.data_ptr(), device, source.data_ptr(), device, target.nbytes, stream())

    return {
        f"cupy.RawKernel gather, {count} owners, {blocks} blocks": gather,
        "cupy memcpyAsync": copy,
        "cupy memcpyPeerAsync, to the same device": copy_peer,
    }
