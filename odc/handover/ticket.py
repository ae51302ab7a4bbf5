"""What a reader has to know of a job: where the ranks' servers listen, and what of which parameter lies where.

Chose one piece of JSON text that the job hands out over a search for jobs on the host: it goes through a file, a pipe
or an actor's arguments alike, and who has none cannot read. The price: it is a password for reading the weights, it is
good for one run of the job, and it grows with the number of parameters (some 200 bytes each).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from odc.errors import OdcError

SCHEMA = "odc-ticket-1"


@dataclass(frozen=True)
class Owner:
    """One rank of the row that is read: its global rank, where its server listens, what to show there."""

    rank: int
    door: str
    token: str


@dataclass(frozen=True)
class Parameter:
    """One parameter as it is published.

    Args:
        names: in the model's state dict; several if it is tied.
        shape: of the whole parameter.
        dtype: compute dtype, in which it is published, without "torch.".
        shard_dim: dimension that is sharded.
        shard_numel: elements of one rank's shard, padded to be equal on all.
        offset: bytes from the heap's start to the shard in the first buffer, the same on every rank.
        buffer_bytes: bytes from there to the same shard in the second buffer, where there is one.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    shard_dim: int
    shard_numel: int
    offset: int
    buffer_bytes: int


@dataclass(frozen=True)
class Ticket:
    """All that a reader is told.

    Args:
        root: identity of the root's heaps.
        owners: by shard.
        parameters: in the order of the heap.
        board, reason: offsets in the heap of the status board and of the text that says why a job was aborted.
        buffers: versions that are kept, 1 or 2.
        nbytes, digest: of the heap and its layout, to tell another run's memory from this one's.
        left_out: names of the state dict that are not published: buffers, and parameters that are not sharded.
    """

    root: str
    owners: tuple[Owner, ...]
    parameters: tuple[Parameter, ...]
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
    def from_json(cls, text: str) -> Ticket:
        """The inverse of `to_json`; raises OdcError for anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("schema") != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            fields["owners"] = tuple(Owner(**owner) for owner in fields["owners"])
            fields["parameters"] = tuple(
                Parameter(**{**one, "names": tuple(one["names"]), "shape": tuple(one["shape"])})
                for one in fields["parameters"]
            )
            return cls(**{**fields, "left_out": tuple(fields["left_out"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OdcError(f"this is not a ticket of odc.handover.ticket: {type(error).__name__}: {error}") from error
