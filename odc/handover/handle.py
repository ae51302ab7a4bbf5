"""The weight handle: one line of JSON that lets a process outside the job read its weights.

It holds where the ranks' servers listen and where each parameter lies in their memory. It is a password for the
weights, good for one run of the job.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from odc.errors import OdcError

SCHEMA = "odc-weight-handle-6"


@dataclass(frozen=True)
class ShardOwner:
    """One rank whose shards are read: its global rank, the address of its server, and the token to present there.

    `host` names the processes that can reach that address and map its memory; those of other hosts reach `listener`
    (address and port), if it has one.
    """

    rank: int
    address: str
    token: str
    host: str
    listener: tuple[str, int] | None = None


@dataclass(frozen=True)
class PublishedParameter:
    """One parameter as the ranks publish it.

    `names` are those in the model's state dict (several if it is tied); `shape` is that of the whole parameter; `dtype`
    is the compute dtype, without "torch."; `shard_numel` counts the elements of one rank's shard, padded to be equal on
    all ranks; `offset` is in bytes from the start of the heap's data to the shard in the first buffer, the same on
    every rank, and `buffer_bytes` from there to the same shard in the second buffer, if there is one; `unit` numbers
    the module with which it is published.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    shard_dim: int
    shard_numel: int
    offset: int
    buffer_bytes: int
    unit: int

    @property
    def nbytes(self) -> int:
        """Of one rank's shard."""
        return self.shard_numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def place(self, version: int, buffers: int) -> int:
        """Bytes from the heap's start to the shard of a version, where so many lie side by side."""
        return self.offset + version % buffers * self.buffer_bytes


@dataclass(frozen=True)
class PublishedUnit:
    """What a rank publishes together: `nbytes` at `offset`, which is that of the first buffer. What has changed of it
    lies in a region that begins at `changes`.
    """

    offset: int
    nbytes: int
    changes: int


@dataclass(frozen=True)
class WeightHandle:
    """Everything that a reader has to know.

    `root` is the identity of the root's heaps; owners stand in the order of shards, parameters in that of the heap;
    `board` and `reason` are offsets in the heap's words of the status board and of the reason why a job was aborted;
    `buffers` is the number of versions that are kept, 1 or 2; `nbytes` and `digest`, the size of the memory file of the
    words and the hash of the heap's layout, differ in another run; `device_bytes` of data lie on a GPU, 0 where they
    lie in that file, too; `left_out` names what the state dict holds and no rank publishes: buffers, and
    parameters that are not sharded; `secret`, in hex, admits to the listeners and is "" if there are none;
    `units` are in the order of their numbers, and the words of their versions at `versions`, where the job packs what
    has changed, by kernels or, without `kernels`, on the CPU; else there are none. `words` names the part of the heap
    that holds words, and is "" where that is the one with the data.
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
    secret: str = ""
    units: tuple[PublishedUnit, ...] = ()
    versions: int = 0
    kernels: bool = False
    words: str = ""
    device_bytes: int = 0

    @cached_property
    def by_unit(self) -> list[list[PublishedParameter]]:
        """The parameters of each of `units`, in the order in which they lie there."""
        found: list[list[PublishedParameter]] = [[] for _ in self.units]
        for one in self.parameters:
            found[one.unit].append(one)
        return found

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> WeightHandle:
        """The inverse of `to_json`; raises OdcError for anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("schema") != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            for one in fields["owners"]:
                one["listener"] = one["listener"] and tuple(one["listener"])
            fields["owners"] = tuple(ShardOwner(**one) for one in fields["owners"])
            fields["parameters"] = tuple(
                PublishedParameter(**{**one, "names": tuple(one["names"]), "shape": tuple(one["shape"])})
                for one in fields["parameters"]
            )
            fields["units"] = tuple(PublishedUnit(**one) for one in fields["units"])
            return cls(**{**fields, "left_out": tuple(fields["left_out"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OdcError(f"this is not a weight handle of odc.handover: {type(error).__name__}: {error}") from error
