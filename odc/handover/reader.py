"""Reading a consistent version of all weights from outside the job, while training goes on.

Chose a sequence lock over any agreement between reader and job: a rank notes which version it begins to publish, copies
its shards, and notes that the version is there; a reader copies, and throws its copy away if a rank has begun a version
that overwrites what was being read. So training never waits for a reader and does not know of it, and a reader that
dies is nobody's loss. The price: a reader that is slower than the job's steps gets nothing. It tries a bounded number
of times and says so (`StaleVersionError`); `Settings(second_buffer=True)` gives it a whole step, whenever it begins,
for a second published shard of memory.

The reader maps the ranks' memory without the right to write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import torch

from odc.errors import StaleVersionError, WaitTimeoutError
from odc.handover.ticket import Parameter, Ticket
from odc.runtime import Backoff, Deadline, ReadOnlyMember, Word

_POLL_S = 1e-3
_LOOK_BYTES = 16 << 20  # copied between two looks at whether the copy is still worth finishing


class Weights(NamedTuple):
    """What `Reader.read` returns: the version's number, and the parameters by name in the model's state dict."""

    version: int
    tensors: dict[str, torch.Tensor]


class Reader:
    """Attached to one job; used by one thread at a time. Close it, or use it as a context manager.

    Args:
        ticket: what `odc.handover.ticket(model)` returned on a rank of the job.
        timeout_s: seconds to wait for a rank that makes no progress: to answer, or to publish what is asked for.
        tries: copies that may be overtaken by the job before `read` gives up.

    Attributes:
        overtaken: copies thrown away so far because a newer version was published over them.
        left_out: names in the model's state dict that are not handed over: buffers, and parameters not sharded.

    Raises:
        PeerLostError: a rank of the job is gone.
        WaitTimeoutError: a rank's server does not answer.
        LayoutMismatchError: the ticket is of another run.
    """

    def __init__(self, ticket: str, *, timeout_s: float = 60.0, tries: int = 8) -> None:
        if tries < 1 or not timeout_s > 0:
            raise ValueError(f"tries must be 1 or more and timeout_s above 0, not {tries!r} and {timeout_s!r}")
        self._ticket, self._timeout_s, self._tries = Ticket.from_json(ticket), timeout_s, tries
        self.overtaken, self.left_out = 0, self._ticket.left_out
        self._by_name = {name: one for one in self._ticket.parameters for name in one.names}
        self._sources: list[ReadOnlyMember] = []
        try:
            for owner in self._ticket.owners:
                source = ReadOnlyMember(
                    owner.rank,
                    owner.door,
                    root=self._ticket.root,
                    token=owner.token,
                    nbytes=self._ticket.nbytes,
                    digest=self._ticket.digest,
                    board=self._ticket.board,
                    reason=self._ticket.reason,
                    timeout_s=timeout_s,
                )
                self._sources.append(source)
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """The newest version that every rank has published; 0 before the first."""
        return min(source.board.load(Word.PUBLISHED) for source in self._sources)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and published dtype of every parameter by name."""
        return {name: (one.shape, _dtype(one)) for name, one in self._by_name.items()}

    @torch.no_grad()
    def read(self, into: Mapping[str, torch.Tensor] | None = None, *, at_least: int = 1) -> Weights:
        """All parameters, whole, of one version: every byte of it and none of any other.

        Args:
            into: tensors to fill, by name, of the right shapes; only these are read. Other dtypes and devices are
                converted to. After an error they hold a mixture. None makes new ones, in the published (compute) dtype
                on the CPU; tied names share one.
            at_least: oldest version that will do; waits until every rank has published it.

        Waits for the job, never the job for it.

        Raises:
            StaleVersionError: `tries` copies were overtaken by newer versions.
            WaitTimeoutError: a rank has neither published what is waited for nor called into odc for `timeout_s`.
            PeerLostError: a rank died, left or aborted.
            ValueError: `into` names what is not handed over, or has another shape.
        """
        wanted = self._destinations(into)
        for _ in range(self._tries):
            version = self._await_version(at_least)
            if self._copy(version, wanted):
                return Weights(version, {name: tensor for one, tensors in wanted for name, tensor in tensors})
            self.overtaken += 1
        more = "" if self._ticket.buffers > 1 else "; Settings(second_buffer=True) in the job gives it more"
        raise StaleVersionError(
            f"{self._tries} copies of the weights of root {self._ticket.root} were each overtaken by a newer version "
            f"(now {self.version}): a fetch takes longer than the job's steps{more}, or raise `tries`"
        )

    def _destinations(self, into: Mapping[str, torch.Tensor] | None) -> list[_Wanted]:
        if into is None:
            made = []
            for one in self._ticket.parameters:
                tensor = torch.empty(one.shape, dtype=_dtype(one))
                made.append((one, [(name, tensor) for name in one.names]))
            return made
        by_parameter: dict[int, _Wanted] = {}
        for name, tensor in into.items():
            known = self._by_name.get(name)
            if known is None:
                raise ValueError(f"{name!r} is not handed over; leave it out of `into`")
            if tuple(tensor.shape) != known.shape:
                raise ValueError(f"{name!r} has shape {known.shape}, not {tuple(tensor.shape)}")
            by_parameter.setdefault(id(known), (known, []))[1].append((name, tensor))
        return list(by_parameter.values())

    # the sequence lock -------------------------------------------------------------------------------------------

    def _await_version(self, at_least: int) -> int:
        """The newest version that all have published and nobody has begun to overwrite."""
        self._refuse_if_gone(f"reading version {at_least} or newer")
        deadline, backoff = Deadline(self._timeout_s), Backoff(_POLL_S, _POLL_S)
        while True:
            published = [source.board.load(Word.PUBLISHED) for source in self._sources]
            version = min(published)
            if version >= max(1, at_least) and not self._overtaken(version):
                return version
            late = self._sources[published.index(version)]
            if deadline.passed(late.board.load(Word.PROGRESS)):
                raise WaitTimeoutError(
                    f"reader, waiting for rank {late.rank} to publish version {max(at_least, *published)}: it has not "
                    f"called into odc for {self._timeout_s:g} s (it published version {version})",
                    culprit=late.rank,
                )
            self._refuse_if_gone(f"waiting for rank {late.rank} to publish version {max(at_least, *published)}")
            backoff.sleep()

    def _overtaken(self, version: int) -> bool:
        """Whether a rank has begun to publish a version that goes where this one lies."""
        over = version + self._ticket.buffers
        return any(source.board.load(Word.PUBLISHING) >= over for source in self._sources)

    def _copy(self, version: int, wanted: Sequence[_Wanted]) -> bool:
        """Copy all of `wanted`; whether it is of `version` to the last byte."""
        unlooked = 0
        for one, tensors in wanted:
            self._assemble(one, version, [tensor for _, tensor in tensors])
            unlooked += one.shard_numel * _dtype(one).itemsize * len(self._sources)
            if unlooked >= _LOOK_BYTES:
                unlooked = 0
                if self._overtaken(version):
                    return False
        # Whoever has copied a byte of a later version sees the word that its writer stored, and fenced, before it.
        self._sources[0].board.fence()
        return not self._overtaken(version)

    def _assemble(self, one: Parameter, version: int, tensors: Sequence[torch.Tensor]) -> None:
        """Put the ranks' shards together in each of `tensors`."""
        dtype, first = _dtype(one), tensors[0]
        direct = first.device.type == "cpu" and first.dtype == dtype and first.is_contiguous()
        whole = first if direct else torch.empty(one.shape, dtype=dtype)
        if one.shard_dim == 0:
            self._lay_end_to_end(one, version, whole)
        else:
            shape = list(one.shape)
            shape[one.shard_dim] //= len(self._sources)
            parts = whole.split(shape[one.shard_dim], one.shard_dim)
            for part, source in zip(parts, self._sources, strict=True):
                part.copy_(source.memory.tensor(dtype, self._place(one, version), one.shard_numel).view(shape))
        for tensor in tensors if whole is not first else tensors[1:]:
            if tensor.data_ptr() != whole.data_ptr():
                tensor.copy_(whole)

    def _lay_end_to_end(self, one: Parameter, version: int, whole: torch.Tensor) -> None:
        """Sharded along the first dimension, shards are consecutive bytes; only the end of the last is padding."""
        at, place, memmove = whole.data_ptr(), self._place(one, version), ctypes.memmove
        left, shard = whole.nbytes, one.shard_numel * whole.itemsize
        for source in self._sources:
            memmove(at, source.memory.address + place, min(shard, left))
            at, left = at + shard, left - min(shard, left)
            if not left:
                return

    def _place(self, one: Parameter, version: int) -> int:
        return one.offset + version % self._ticket.buffers * one.buffer_bytes

    # the end of the job, and of the reader -----------------------------------------------------------------------

    def _refuse_if_gone(self, doing: str) -> None:
        for source in self._sources:
            source.refuse_if_gone(doing)

    def close(self) -> None:
        """Let go of the ranks' memory; nobody notices. Idempotent."""
        for source in self._sources:
            source.close()
        self._sources = []

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_Wanted = tuple[Parameter, list[tuple[str, torch.Tensor]]]


def _dtype(one: Parameter) -> torch.dtype:
    found = getattr(torch, one.dtype)
    assert isinstance(found, torch.dtype)
    return found
