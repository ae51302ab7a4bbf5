"""add: the owner's half of staged pushes, which adds the contents of slots to the accumulator.

Plain loads and stores suffice, because one stream alone adds. The values of several sources are added to a place one
after the other in registers: the sums are those of as many adds, and the accumulator is read and written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from odc.kernels.dtypes import accumulator_dtype, kernel_dtype
from odc.kernels.launch import PreparedLaunch, block_of, ceil_div, contiguous, prepared
from odc.kernels.rows import row_numbers, row_of
from odc.kernels.tables import passing_table
from odc.kernels.tile import add_tile

_COLUMNS = tl.constexpr(5)  # first program, place, elements, number of the first source, sources


@triton.jit(do_not_specialize=["rows_at", "rows", "sources"])
def add_kernel(
    rows_at: tl.tensor,
    rows: tl.int64,
    sources: tl.tensor,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: blocks of all places."""
    program = tl.program_id(0)
    row = row_of(rows_at, rows, program, _COLUMNS)
    at = (program - tl.load(row)) * BLOCK
    target = tl.load(row + 1) + at * (TO.primitive_bitwidth // 8)
    add_tile(target, sources + tl.load(row + 3), tl.load(row + 4), at, tl.load(row + 2) - at, TO, FROM, BLOCK)


def add(places: Sequence[torch.Tensor], values: Sequence[torch.Tensor], *, block: int | None = None) -> None:
    """Add each of `values` to its place, once: see `AddPlan`."""
    AddPlan(places, [[value] for value in values], block=block).run()


class AddPlan:
    """Adds to each place all of its values, in their order and in the place's dtype, whenever it runs.

    Args:
        places: contiguous views of an accumulator that do not overlap, fp32 or fp64; UnsupportedError for another.
        values: for each place one or more tensors of one dtype (fp64, fp32, fp16 or bf16), contiguous, as long as it.
        block: elements for one program.

    Raises ValueError if values are not as long as their place, of several dtypes, or not on one device.
    """

    def __init__(
        self, places: Sequence[torch.Tensor], values: Sequence[Sequence[torch.Tensor]], *, block: int | None = None
    ) -> None:
        self._mapped = places, values  # the launches have addresses alone
        self._device = device = places[0].device if places else torch.device("cpu")
        contiguous("place", places, device)
        sums: list[_Sum] = []
        for place, sources in zip(places, values, strict=True):
            contiguous("value", sources, device)
            n, kinds = place.numel(), {(source.dtype, source.numel()) for source in sources}
            if len(kinds) != 1 or sources[0].numel() != n:
                had = ", ".join(f"{source.numel()} elements of {source.dtype}" for source in sources)
                raise ValueError(f"values of one dtype and {n} elements are needed; these are {had or 'none'}")
            addresses = tuple([source.data_ptr() for source in sources])
            sums.append((place.data_ptr(), n, place.dtype, sources[0].dtype, addresses))
        self._launches = _launches(device, block, tuple(sums))

    def run(self) -> None:
        """Ask for it. Does not wait: the caller has seen that the values have arrived, returns the slots afterwards,
        and makes sure that no other program adds. One launch for each pair of dtypes, on the current stream; see
        `launch` for threads and errors.
        """
        device = self._device
        for run, programs, numbers, rows, addressed in self._launches:
            run(programs, passing_table(numbers, device), rows, passing_table(addressed, device))


_KEPT = 1024  # launches
_Sum = tuple[int, int, torch.dtype, torch.dtype, tuple[int, ...]]  # place, elements, its dtype, the sources' and they
_Launch = tuple[PreparedLaunch, int, tuple[int, ...], int, tuple[int, ...]]


@lru_cache(maxsize=_KEPT)
def _launches(device: torch.device, block: int | None, sums: tuple[_Sum, ...]) -> list[_Launch]:
    """(launch, programs, numbers of the table, rows, addresses of the sources) for each pair of dtypes."""
    groups: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, int, tuple[int, ...]]]] = {}
    for place, n, to, origin, addresses in sums:
        groups.setdefault((to, origin), []).append((place, n, addresses))
    found = []
    for (to, origin), added in groups.items():
        size = block or block_of(add_kernel, max(to.itemsize, origin.itemsize), max(n for _, n, _ in added))
        programs = [ceil_div(n, size) for _, n, _ in added]
        sources: list[int] = []
        columns = []
        for place, n, addresses in added:
            columns.append((place, n, len(sources), len(addresses)))
            sources += addresses
        run = prepared(add_kernel, device, TO=accumulator_dtype(to), FROM=kernel_dtype(origin), BLOCK=size)
        found.append((run, sum(programs), *row_numbers(programs, columns), tuple(sources)))
    return found
