"""The weight handle: one line of JSON that lets a process outside the job read its weights.

It says where the ranks' servers listen and where each parameter lies in their memory. It goes through a file, a pipe or
an actor's arguments alike, and is a password for the weights, good for one run of the job. It takes some 200 bytes for
each parameter.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from odc.errors import OdcError

SCHEMA = "odc-weight-handle-1"


@dataclass(frozen=True)
class ShardOwner:
    """One rank whose shards are read: its global rank, the address of its server, and the token to present there."""

    rank: int
    address: str
    token: str


@dataclass(frozen=True)
class PublishedParameter:
    """One parameter as the ranks publish it.

    Args:
        names: names in the model's state dict; several if it is tied.
        shape: shape of the whole parameter.
        dtype: compute dtype, in which it is published, without "torch.".
        shard_dim: dimension that is sharded.
        shard_numel: elements of one rank's shard, padded to be equal on all ranks.
        offset: bytes from the heap's start to the shard in the first buffer, the same on every rank.
        buffer_bytes: bytes from there to the same shard in the second buffer, if there is one.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    shard_dim: int
    shard_numel: int
    offset: int
    buffer_bytes: int


@dataclass(frozen=True)
class WeightHandle:
    """Everything that a reader has to know.

    Args:
        root: identity of the root's heaps.
        owners: the ranks to read from, by shard.
        parameters: in the order of the heap.
        board, reason: offsets in the heap of the status board and of the text that says why a job was aborted.
        buffers: number of versions that are kept, 1 or 2.
        nbytes, digest: size of the heap and hash of its layout, which differ in another run.
        left_out: names of the state dict that are not published: buffers, and parameters that are not sharded.
    """

    root: str
    owners: tuple[ShardOwner, ...]
    parameters: tuple[PublishedParameter, ...]
    board: int
    reason: int
    buffers: int
    nbytes: int
    digest: str
    left_out: tuple[str, ...]

    def to_json(self) -> str:
        """One line of text, ASCII."""
        return json.dumps({"schema": SCHEMA, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> WeightHandle:
        """The inverse of `to_json`; raises OdcError for anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("schema") != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            fields["owners"] = tuple(ShardOwner(**owner) for owner in fields["owners"])
            fields["parameters"] = tuple(
                PublishedParameter(**{**one, "names": tuple(one["names"]), "shape": tuple(one["shape"])})
                for one in fields["parameters"]
            )
            return cls(**{**fields, "left_out": tuple(fields["left_out"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OdcError(f"this is not a weight handle of odc.handover: {type(error).__name__}: {error}") from error
