"""A microbatch's tensors as one run of bytes: a plain text header (name, dtype, shape), then the tensors' bytes.

Nothing from a peer is ever executed, and the received bytes need no second copy.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence

import torch

from odc.errors import UnsupportedError
from odc.memory import round_up

_LENGTH = struct.Struct("<q")
_ALIGN = 64  # bytes; every tensor can be viewed in its own dtype in place


class PackedMicrobatch:
    """The tensors of one microbatch by name, dense and on the CPU, of any dtype and shape; read by `write`, not before.

    Raises UnsupportedError where a name is no text, or a value is no dense CPU tensor.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            _refuse(name, tensor)
        self._tensors = [tensor.detach() for tensor in tensors.values()]
        entries = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in zip(tensors, self._tensors, strict=True)
        ]
        self._header = json.dumps(entries).encode()
        self._offsets, self.nbytes = _offsets(len(self._header), [tensor.nbytes for tensor in self._tensors])

    def write(self, into: torch.Tensor) -> None:
        """Copy everything into `into`, uint8 [nbytes], contiguous."""
        head = bytearray(_LENGTH.pack(len(self._header)) + self._header)
        into[: len(head)].copy_(torch.frombuffer(head, dtype=torch.uint8))
        for offset, tensor in zip(self._offsets, self._tensors, strict=True):
            if tensor.numel():
                into[offset : offset + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))


def unpack(raw: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a `PackedMicrobatch` was made of, as views of `raw`, uint8 [nbytes], 64-byte aligned."""
    (length,) = _LENGTH.unpack(raw[: _LENGTH.size].numpy().tobytes())
    entries = json.loads(raw[_LENGTH.size : _LENGTH.size + length].numpy().tobytes())
    dtypes: list[torch.dtype] = [getattr(torch, dtype) for _, dtype, _ in entries]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, (_, _, shape) in zip(dtypes, entries, strict=True)]
    offsets, _ = _offsets(length, sizes)
    return {
        name: raw[offset : offset + size].view(dtype).view(shape) if size else raw.new_empty(shape, dtype=dtype)
        for (name, _, shape), dtype, offset, size in zip(entries, dtypes, offsets, sizes, strict=True)
    }


def _offsets(header: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offset of each tensor behind a header of `header` bytes, and the bytes of it all."""
    offsets, end = [], round_up(_LENGTH.size + header, _ALIGN)
    for size in sizes:
        offsets.append(end)
        end = round_up(end + size, _ALIGN)
    return offsets, end


def _refuse(name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise UnsupportedError(f"a microbatch names its tensors by text, not by {name!r}")
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"{name!r} of a microbatch is a {type(tensor).__name__}: only tensors travel in a queue")
    dense = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not dense or tensor.device.type != "cpu" or tensor.is_quantized:
        raise UnsupportedError(
            f"{name!r} of a microbatch is a {type(tensor).__name__} ({tensor.layout}) on {tensor.device}: only dense "
            "tensors on the CPU travel in a queue"
        )
