"""Tensors as rows of bytes: what every exchange moves, whatever the dtype.

Chose bytes over dtypes, so that one exchange takes fields of several dtypes at once and none is left out (float8, bool,
complex). The price is that a row is copied byte by byte by the kernels that gather rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import torch

from odc.dispatch.route import Route
from odc.errors import PlanError, UnsupportedError


class Kind(NamedTuple):
    """What a field's rows are, the same on every rank: dtype and features."""

    dtype: torch.dtype
    features: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.features).numel() * self.dtype.itemsize


def kinds_of(route: Route, tensors: Mapping[str, torch.Tensor], who: str) -> dict[str, Kind]:
    """The kind of every field; raises PlanError unless the tensors are what the route expects of this rank.

    Args:
        route: of this rank.
        tensors: by field, [rows, features...]; also with 0 rows.
        who: names the rank.
    """
    if set(tensors) != set(route.fields):
        raise PlanError(f"{who} brings fields {sorted(tensors)}; the plan moves {sorted(route.fields)}")
    for name, tensor in tensors.items():
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
    return tensor.detach().contiguous().view(-1).view(torch.uint8).view(rows, kind.row_bytes)


def from_bytes(raw: torch.Tensor, kind: Kind) -> torch.Tensor:
    """[rows, features...] of bytes uint8 [rows, bytes of a row] that begin where the dtype may begin."""
    if not raw.numel():
        return torch.empty(raw.shape[0], *kind.features, dtype=kind.dtype, device=raw.device)
    return raw.view(-1).view(kind.dtype).view(raw.shape[0], *kind.features)


def signature(route: Route, kinds: Mapping[str, Kind]) -> int:
    """63 bits that agree on two ranks only if route, dtypes and features do."""
    found = hashlib.sha256(route.digest)
    for name, kind in sorted(kinds.items()):
        found.update(f"{name}:{kind.dtype}:{kind.features};".encode())
    return int.from_bytes(found.digest()[:8], "little") >> 1
