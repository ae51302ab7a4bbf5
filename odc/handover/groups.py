"""Reading all weights group by group, in bounded memory: for processes that load parameters one after the other."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch

from odc.handover.reader import Reader
from odc.memory import advise_huge
from odc.worker import Job, Worker

GROUP_BYTES = 64 << 20  #: for a rollout, which holds two groups: new pages cost more than larger groups gain
_ALIGNMENT = 16  # bytes, of a tensor's place among those of its group
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def read_groups(
    reader: Reader,
    nbytes: int,
    version: int,
    names: Collection[str] | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield all parameters of exactly this version, or those of `names`: {name: whole tensor in compute dtype}, on
    `device`, which has an index if it is a GPU.

    A group has at most `nbytes` bytes, or one larger parameter. While the caller uses a group the next is read, on a
    thread, into another half of one storage: tensors are good until the caller asks for the next group, and on a GPU
    for what its current stream has been asked for until then. On the CPU, where a reader that maps a GPU fills pinned
    memory, that holds for the current stream of its GPU. Waits for that work, and as `Reader.read` does; nothing else
    may use the reader meanwhile.

    Raises StaleVersionError once a rank publishes the next version, or with `second_buffer` the one after it (what was
    yielded before is of the older one); ValueError if `names` has one that is not exported; else as `Reader.read`.
    """
    shapes = reader.shapes()
    if names is not None:
        if unknown := sorted(set(names) - shapes.keys()):
            raise ValueError(f"not exported: {', '.join(unknown)}")
        shapes = {name: one for name, one in shapes.items() if name in names}
    groups = _groups_of(shapes, nbytes)
    device, most = torch.device(device), [max(map(_bytes_of, groups[i::2])) for i in range(min(2, len(groups)))]
    pinned = device.type == "cpu" and reader.device.type == "cuda"  # a GPU's copies into other memory are slower
    room = torch.empty(sum(most), dtype=torch.uint8, device=device, pin_memory=pinned)
    if device.type == "cpu" and not pinned:
        advise_huge(room)  # it is used once or twice: much of the time would be page faults
    rooms = room.split(most)
    worker = Worker("odc-reader")

    def begin(number: int) -> Job[dict[str, torch.Tensor]]:
        into = _laid_out(groups[number], rooms[number % 2])
        user = reader.device if pinned else device
        if user.type == "cuda":  # the room's last tensors, or what its memory was used for before, may be in use
            torch.cuda.current_stream(user).synchronize()
        job = Job(lambda: _read(reader, into, version))
        worker.submit(job)
        return job

    following = begin(0) if groups else None
    try:
        for number in range(1, len(groups) + 1):
            assert following is not None
            tensors = following.wait()
            following = begin(number) if number < len(groups) else None
            yield tensors
    finally:
        if following is not None:
            following.cancel()  # the caller may close the reader
        worker.close()


def _read(reader: Reader, into: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    try:
        return reader.read(into, at_least=version, exactly=True).tensors
    except BaseException:
        for device in {reader.device, *(tensor.device for tensor in into.values())}:
            if device.type == "cuda":  # copies may be under way into rooms that are given back now
                torch.cuda.current_stream(device).synchronize()
        raise


def _groups_of(shapes: Shapes, nbytes: int) -> list[Shapes]:
    """The parameters in order, in groups of at most so many bytes, or of one parameter that is larger."""
    groups: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = []
    left = 0
    for name, one in shapes.items():
        left -= _place(one)
        if left < 0 or not groups:
            groups.append({})
            left = nbytes - _place(one)
        groups[-1][name] = one
    return list(groups)


def _bytes_of(group: Shapes) -> int:
    """Of a room for the group."""
    return sum(_place(one) for one in group.values())


def _place(one: tuple[tuple[int, ...], torch.dtype]) -> int:
    """Bytes of a parameter's place, with the gap behind it."""
    shape, dtype = one
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _laid_out(group: Shapes, room: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of the group, one behind the other in `room` (uint8)."""
    found, at = {}, 0
    for name, (shape, dtype) in group.items():
        found[name] = room[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        at += _place((shape, dtype))
    return found
