"""What all exchanges share: the `Exchange` protocol, and tensors as rows of bytes, whatever their dtype.

A move is identified by its step and its channel's name. All ranks make the moves of a step in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from odc.dispatch.rearrangement import Ints
from odc.dispatch.route import Route
from odc.errors import PlanError, UnsupportedError
from odc.protocol import RankGrid

BACK = ".back"  # added to the channel of a move by the move of its gradients


class Exchange(Protocol):
    """Moves tensors between the instances of one group.

    Attributes:
        ranks: global rank of each instance.
        me: this instance.
        moved: bytes that this rank sent to others since the start, by channel.
        buffer_bytes: most bytes that this rank's buffers for sending and receiving took at once, so far.
    """

    ranks: tuple[int, ...]
    me: int
    moved: dict[str, int]
    buffer_bytes: int

    @property
    def per_host(self) -> int:
        """Instances of each host, as the ranks themselves report; all ranks ask together.

        Where hosts have unequally many, of each of the equal parts into which hosts are divided (docs/clusters.md).
        Raises UnsupportedError unless those of a host, or part, follow each other.
        """
        ...

    def gather(self, step: int, channel: str, values: Ints) -> list[Ints]:
        """The int64 arrays [any length] of all instances; on the planning thread. Waits for all.

        Raises:
            WaitTimeoutError, PeerLostError: a rank, which is named, did not come.
        """
        ...

    def move(
        self, step: int, channel: str, route: Route, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Send local rows and return the rows for this rank, by field; on the main thread, without gradients.

        Args:
            step: at most one move of each channel in a step; steps rise.
            channel: names the move.
            route: this rank's part of a move that all ranks planned alike.
            tensors: by field [rows, features...], dense; also with 0 rows, so that dtype and features are known.

        Raises:
            PlanError: tensors are not what was planned, or another rank planned another move; the rank is named.
            WaitTimeoutError, PeerLostError: a rank, which is named, did not come.
        """
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


def instances_of_host(grid: RankGrid) -> int:
    """`Exchange.per_host` of ranks whose hosts are known."""
    if list(grid.hosts) != sorted(grid.hosts):
        raise UnsupportedError(
            f"rank {grid.rank}: a node is a host, whose instances follow each other, but ranks {grid.ranks} are on "
            f"hosts {grid.hosts}; list them by host, or declare Nodes(size)"
        )
    return len(grid.local)


def sent_bytes(route: Route, row_bytes: Mapping[str, int]) -> list[int]:
    """[d] bytes for each destination, this instance included."""
    totals = sum(field.sent * row_bytes[name] for name, field in route.fields.items())
    listed: list[int] = totals.tolist()  # type: ignore[union-attr]  # a route has at least one field
    return listed


class Kind(NamedTuple):
    """Dtype and features of a field's rows, the same on every rank."""

    dtype: torch.dtype
    features: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return torch.Size(self.features).numel() * self.dtype.itemsize


def kinds_of(route: Route, tensors: Mapping[str, torch.Tensor], who: str) -> dict[str, Kind]:
    """The kind of every field; raises PlanError unless tensors [rows, features...] are what the route expects."""
    if set(tensors) != set(route.fields):
        raise PlanError(f"{who} brings fields {sorted(tensors)}; the plan moves {sorted(route.fields)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise PlanError(
                f"{who} brings {type(tensor).__name__} as field {name!r}: pass zeros where there is no gradient"
            )
        if tensor.layout is not torch.strided or not tensor.ndim:
            raise UnsupportedError(f"{who}: field {name!r} must be a dense tensor [rows, ...], not {tensor.layout}")
        expected = len(route.fields[name].pack)
        if tensor.shape[0] != expected:
            raise PlanError(
                f"{who} brings {tensor.shape[0]} rows of field {name!r}, but the plan has {expected} there: the "
                "lengths it announced are not those of its tensors"
            )
    return {name: Kind(tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, bytes of a row], contiguous; a view where the tensor is contiguous."""
    rows = tensor.shape[0]
    kind = Kind(tensor.dtype, tuple(tensor.shape[1:]))
    if not tensor.numel():
        return torch.empty(rows, kind.row_bytes, dtype=torch.uint8, device=tensor.device)
    resolved = tensor.detach().resolve_conj().resolve_neg()  # else the bytes are those of another tensor
    return resolved.contiguous().view(-1).view(torch.uint8).view(rows, kind.row_bytes)


def from_bytes(raw: torch.Tensor, kind: Kind) -> torch.Tensor:
    """[rows, features...] from uint8 [rows, bytes of a row] that is aligned for the dtype."""
    if not raw.numel():
        return torch.empty(raw.shape[0], *kind.features, dtype=kind.dtype, device=raw.device)
    return raw.view(-1).view(kind.dtype).view(raw.shape[0], *kind.features)


def signature(route: Route, kinds: Mapping[str, Kind]) -> int:
    """63 bits that agree on two ranks only if route, dtypes and features do."""
    found = hashlib.sha256(route.digest)
    for name, kind in sorted(kinds.items()):
        found.update(f"{name}:{kind.dtype}:{kind.features};".encode())
    return int.from_bytes(found.digest()[:8], "little") >> 1
