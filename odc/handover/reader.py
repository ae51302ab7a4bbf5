"""Reading one consistent version of all weights from outside the job, while training goes on.

A sequence lock keeps job and reader independent. A rank notes which version it begins to publish, copies its shards,
and notes that the version is there. A reader copies, and discards its copy if a rank has begun to overwrite it. So
training never waits for a reader. The reader maps the memory of ranks of its host read-only, on a GPU where it lies on
one, and reads that of others over the network; there it reads only what has changed since it read last, where the job
packs that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from odc.deadlines import Backoff, Deadline
from odc.errors import StaleVersionError, UnsupportedError, WaitTimeoutError
from odc.handover.handle import PublishedParameter, ShardOwner, WeightHandle
from odc.handover.kept import KeptMember, bring, keeps
from odc.handover.slices import ParameterSlice, ShardPart, parts_of, slice_of, whole_of
from odc.memory import advise_huge
from odc.net import host_identity
from odc.protocol import Word
from odc.runtime import MappedMember, ReadOnlyMember, RemoteMember, WeightEngine

_POLL_S, _LONGEST_POLL_S = 1e-3, 20e-3  # the latter where a look is a request to another host
# Copied between two looks at whether the copy is still worth finishing, for each request to another host in a look.
_LOOK_BYTES = 16 << 20
_CPU = torch.device("cpu")


class Weights(NamedTuple):
    """What `Reader.read` returns: the version's number, and the parameters by name in the model's state dict."""

    version: int
    tensors: dict[str, torch.Tensor]


class _Wanted(NamedTuple):
    """A parameter, or a slice of it, of `shape`: the parts of shards to read, and the tensors to fill by name."""

    parameter: PublishedParameter
    shape: tuple[int, ...]
    parts: list[ShardPart]
    tensors: dict[str, torch.Tensor]


class Reader:
    """Attached to one job; for one thread at a time, and no forked child. Close it, or use it as a context manager.

    `handle` is the text that `odc.handover.weight_handle(model)` returned on a rank of the job; `timeout_s` is how long
    to wait for a rank that makes no progress; `tries` is how many copies the job may overtake before `read` gives up.
    Where the job packs what changes (docs/changes.md), a reader keeps a copy of the shards on other hosts, in CPU
    memory and compute dtype, and from then on reads only what has changed; `changes=False` keeps nothing and reads all.
    Without numba (extra `fast`) it keeps nothing of weights that lie on GPUs.
    `device` is the GPU that maps weights on GPUs of this host, by default the current one. With "cpu", and in a process
    without CUDA, they are read over the network, from ranks that listen there.

    `reader.device` is that GPU, or the CPU if no GPU maps anything; `overtaken` counts copies discarded so far;
    `left_out` names what the state dict holds and the job does not export (buffers, and parameters not sharded). Raises
    PeerLostError if a rank of the job is gone, WaitTimeoutError if a rank's server does not answer, LayoutMismatchError
    if the handle belongs to another run, UnsupportedError if a rank that is to be read over the network does not listen
    there, or the GPU cannot map a rank's memory.
    """

    def __init__(
        self,
        handle: str,
        *,
        timeout_s: float = 60.0,
        tries: int = 8,
        changes: bool = True,
        device: torch.device | str | int | None = None,
    ) -> None:
        if tries < 1 or not timeout_s > 0:
            raise ValueError(f"tries must be 1 or more and timeout_s above 0, not {tries!r} and {timeout_s!r}")
        self._handle, self._timeout_s, self._tries = WeightHandle.from_json(handle), timeout_s, tries
        self.overtaken, self.left_out = 0, self._handle.left_out
        self._by_name = {name: one for one in self._handle.parameters for name in one.names}
        self._sources: list[ReadOnlyMember] = []
        self._kept: list[KeptMember] = []  # those of `_sources` of which a copy is kept
        self._keeps = changes and keeps(self._handle)
        self._look_bytes = _LOOK_BYTES
        self._engine: WeightEngine | None = None
        self.device, self._pid = _CPU, os.getpid()
        try:
            self._attach(host_identity(), device)
        except BaseException:
            self.close()
            raise

    def _attach(self, here: str, device: torch.device | str | int | None) -> None:
        handle = self._handle
        near = [owner for owner in handle.owners if owner.host == here]
        if near and handle.device_bytes:
            self.device = _gpu(device)
            near = near if self.device.type == "cuda" else []
        distant = [owner for owner in handle.owners if owner not in near]
        for owner in distant:
            if owner.listener is None:
                raise UnsupportedError(_unreachable(owner, here))
        if distant:
            listeners = {owner.rank: owner.listener for owner in distant if owner.listener is not None}
            self._engine = WeightEngine(handle.root, bytes.fromhex(handle.secret), listeners, self._timeout_s)
            self._look_bytes = _LOOK_BYTES * len(distant)
        for owner in handle.owners:
            if self._engine is None or owner not in distant:
                self._sources.append(self._map(owner))
                continue
            member = RemoteMember(owner.rank, self._engine, handle.digest, handle.words)
            if self._keeps:
                self._kept.append(KeptMember(member, handle))
            self._sources.append(self._kept[-1] if self._keeps else member)

    def _map(self, owner: ShardOwner) -> MappedMember:
        handle = self._handle
        return MappedMember(
            owner.rank,
            owner.address,
            root=handle.root,
            token=owner.token,
            nbytes=handle.nbytes,
            digest=handle.digest,
            board=handle.board,
            reason=handle.reason,
            timeout_s=self._timeout_s,
            device_bytes=handle.device_bytes,
            device=self.device,
        )

    @property
    def version(self) -> int:
        """The newest version that every rank has published; 0 before the first."""
        self._refuse_unattached()
        return min(source.load()[Word.PUBLISHED] for source in self._sources)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and published dtype of every parameter by name."""
        return {name: (one.shape, one.torch_dtype) for name, one in self._by_name.items()}

    @torch.no_grad()
    def read(
        self,
        into: Mapping[str, Any] | None = None,
        *,
        at_least: int = 1,
        exactly: bool = False,
        slices: Mapping[str, tuple[int, int, int]] | None = None,
    ) -> Weights:
        """All parameters, whole or the slices asked for, of one version to the last byte. Training never waits for it.

        Args:
            into: tensors to fill, by name, of the right shapes, or writable arrays of any library that has DLPack
                (NumPy, CuPy); only these are read, and converted to their dtype and device. After an error they hold a
                mixture. What is returned are tensors of the same memory. None makes new CPU tensors in the published
                (compute) dtype, of which tied names share one, unless their slices differ. Work on a GPU is done in
                this thread's current stream, which is waited for.
            at_least: the oldest acceptable version; waits until every rank has published it.
            exactly: accept no other version, as where several reads are to fit together; it is 1 or more.
            slices: for a receiver under tensor parallelism, (dim, start, stop) by name: of this parameter only the
                elements whose index along `dim` is in [start, stop), for which `into` has a tensor of their shape. If
                `dim` is 0 no other bytes are read; if it is another in which the parameter is sharded, only the shards
                that hold some; else all shards, which are cut one at a time. Of copies that are kept, see `Reader`, all
                shards are read.

        Raises StaleVersionError if `tries` copies were overtaken by newer versions, or the version to be read exactly
        lies nowhere any more; WaitTimeoutError if a rank has neither published the version nor called into odc for
        `timeout_s`; PeerLostError if a rank died, exited or aborted; ValueError if `into` names a tensor that is not
        exported, or has another shape, or is read-only, or if `slices` names one that is not read, or leaves its shape.
        """
        if exactly and at_least < 1:
            raise ValueError(f"no rank ever publishes version {at_least}: the first is version 1")
        self._refuse_unattached()
        wanted = self._destinations(into, slices or {})
        for left in range(self._tries, 0, -1):
            if left == 1 < self._tries and self._handle.buffers > 1:
                self._drop_kept()  # whole shards of a version can be read for longer than its changes
            version = self._await_version(at_least, exactly, [one.parameter for one in wanted])
            if self._copy(version, wanted):
                return Weights(version, {name: tensor for one in wanted for name, tensor in one.tensors.items()})
            self.overtaken += 1
        more = "" if self._handle.buffers > 1 else "; Settings(second_buffer=True) in the job gives it more"
        raise StaleVersionError(
            f"{self._tries} copies of the weights of root {self._handle.root} were each overtaken by a newer version "
            f"(now {self.version}): a fetch takes longer than the job's steps{more}, or raise `tries`"
        )

    def _destinations(self, into: Mapping[str, Any] | None, slices: Mapping[str, Any]) -> list[_Wanted]:
        names = self._by_name if into is None else into
        if unread := sorted(slices.keys() - names.keys()):
            why = "is not exported" if into is None else "is not in `into`"
            raise ValueError(f"{unread[0]!r} {why}; leave it out of `slices`")
        found: dict[tuple[int, ParameterSlice], _Wanted] = {}
        for name in names:
            tensor = None if into is None else _tensor_over(name, into[name])
            known = self._by_name.get(name)
            if known is None:
                raise ValueError(f"{name!r} is not exported; leave it out of `into`")
            cut = slice_of(name, known, slices[name]) if name in slices else whole_of(known)
            shape = cut.shape_of(known)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(f"{name!r} has shape {shape}, not {tuple(tensor.shape)}")
            one = found.get((id(known), cut))
            if one is None:
                parts = parts_of(known, len(self._sources), cut)
                one = found[id(known), cut] = _Wanted(known, shape, parts, {})
            if tensor is None:
                tensor = next(iter(one.tensors.values()), None)
            if tensor is None:
                tensor = torch.empty(shape, dtype=known.torch_dtype, device="cpu")
                advise_huge(tensor)
            one.tensors[name] = tensor
        return list(found.values())

    def _await_version(self, at_least: int, exactly: bool, parameters: Sequence[PublishedParameter]) -> int:
        """The newest version that all ranks have published, and none has begun to overwrite: its shards, or the changes
        where they are to be read. With `exactly` version `at_least`, whose shards outlast its changes.
        """
        buffers = self._handle.buffers
        lasts = 1 if any(member.holds(parameters) for member in self._kept) else buffers
        self._refuse_if_gone(f"reading version {at_least} or newer")
        deadline = Deadline(self._timeout_s)
        backoff = Backoff(_POLL_S, _POLL_S if self._engine is None else _LONGEST_POLL_S)
        while True:
            published = [source.load()[Word.PUBLISHED] for source in self._sources]
            version = min(published)
            if exactly and self._overtaken(at_least + buffers):
                raise StaleVersionError(
                    f"version {at_least + buffers} was published while version {at_least} was still to be read"
                )
            if exactly and version >= at_least:
                if lasts < buffers and self._overtaken(at_least + lasts):
                    self._drop_kept()
                return at_least
            if version >= max(1, at_least) and not self._overtaken(version + lasts):
                return version
            late = self._sources[published.index(version)]
            if deadline.passed(late.load()[Word.PROGRESS]):
                raise WaitTimeoutError(
                    f"reader, waiting for rank {late.rank} to publish version {max(at_least, *published)}: it has not "
                    f"called into odc for {self._timeout_s:g} s (it published version {version})",
                    culprit=late.rank,
                )
            self._refuse_if_gone(f"waiting for rank {late.rank} to publish version {max(at_least, *published)}")
            backoff.sleep()

    def _drop_kept(self) -> None:
        """Have the shards on other hosts read whole."""
        for member in self._kept:
            member.drop()

    def _overtaken(self, over: int) -> bool:
        """Whether a rank has begun to publish version `over`, which comes to lie where another one was."""
        return any(source.load()[Word.PUBLISHING] >= over for source in self._sources)

    def _copy(self, version: int, wanted: Sequence[_Wanted]) -> bool:
        """Copy all of `wanted`; whether it is of `version` to the last byte."""
        buffers = self._handle.buffers
        parameters = list({id(one.parameter): one.parameter for one in wanted}.values())
        if self._kept and not bring(self._kept, version, parameters, buffers, self._overtaken):
            return False
        direct = len(self._sources) - len(self._kept)
        extents: list[list[tuple[int, int]]] = [[] for _ in self._sources]
        for one in wanted:
            for part in one.parts:
                extents[part.shard].append((one.parameter.place(version, buffers) + part.first, part.nbytes))
        for source, expected in zip(self._sources, extents, strict=True):
            source.expect(expected)
        unlooked = 0
        for one in wanted:
            self._assemble(one, version)
            unlooked += sum(part.nbytes for part in one.parts)
            if direct and unlooked >= self._look_bytes:
                unlooked = 0
                if self._overtaken(version + buffers):
                    return False
        if not direct:  # what is kept does not change meanwhile
            return True
        # If a byte of a later version was copied, the word that its writer stored and fenced before it is visible.
        for source in self._sources:
            source.fence()
        return not self._overtaken(version + buffers)

    def _assemble(self, one: _Wanted, version: int) -> None:
        """Assemble the parts of the ranks' shards in each of the tensors."""
        parameter, (first, *others) = one.parameter, one.tensors.values()
        dtype, place = parameter.torch_dtype, parameter.place(version, self._handle.buffers)
        direct = first.device in (self.device, _CPU) and first.dtype == dtype and first.is_contiguous()
        whole = first.detach() if direct else torch.empty(one.shape, dtype=dtype, device=self.device)
        for part in one.parts:
            room = whole.narrow(parameter.shard_dim, part.at, part.length)
            straight = part.taken is None and room.is_contiguous()
            read = room if straight else torch.empty(part.shape, dtype=dtype, device=self.device)
            # A dimension of one element may have any stride, which no view as bytes takes.
            flat = read.as_strided((read.numel(),), (1,))
            self._sources[part.shard].copy(place + part.first, flat.view(torch.uint8))
            if not straight:
                room.copy_(part.of(read))
        for tensor in others if direct else (first, *others):
            if tensor.data_ptr() != whole.data_ptr():
                tensor.copy_(whole)

    def _refuse_unattached(self) -> None:
        """Refuse a forked child, in which the ranks' memory reads as zeros and they seem dead, and a closed reader."""
        if os.getpid() != self._pid:
            raise UnsupportedError(
                "reader: a process that was forked from that of a reader cannot read by it: let it make a Reader of "
                "its own, by the same weight handle"
            )
        if not self._sources:
            raise ValueError("this reader is closed")

    def _refuse_if_gone(self, doing: str) -> None:
        for source in self._sources:
            source.refuse_if_gone(doing)

    def close(self) -> None:
        """Unmap the ranks' memory, and hang up. Idempotent."""
        for source in self._sources:
            source.close()
        self._sources, self._kept = [], []
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _gpu(asked: torch.device | str | int | None) -> torch.device:
    """The device that is to map GPUs' memory; the CPU if none is."""
    if not torch.cuda.is_available():
        return _CPU
    found = torch.device("cuda" if asked is None else asked)
    return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found


def _unreachable(owner: ShardOwner, here: str) -> str:
    """Why a rank that does not listen cannot be read."""
    if owner.host == here:
        where = "has its weights on a GPU, which this process does not map but would read over the network"
    else:
        where = "is on another host, or in a container that does not share network and PID namespace with this process"
    return f"reader: rank {owner.rank} {where}, and does not listen there; set Settings(address=...) in its job"


def _has_memory(tensor: torch.Tensor) -> bool:
    """Not so of meta and sparse tensors, and of those that wrap others, whose address is 0."""
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _tensor_over(name: str, given: Any) -> torch.Tensor:
    """A tensor that is, or shares the memory of, what a caller has given to be filled."""
    if isinstance(given, torch.Tensor):
        if not _has_memory(given):
            kind = type(given).__name__
            raise ValueError(
                f"{name!r} is a {kind} on {given.device} without memory of its own to fill; of a DTensor give the "
                "local tensor, and what it holds in `slices`"
            )
        return given
    if not hasattr(given, "__dlpack__"):
        raise ValueError(f"{name!r} is a {type(given).__name__}: `into` takes tensors, and arrays that have DLPack")
    if not getattr(getattr(given, "flags", None), "writeable", True):  # as NumPy says it
        raise ValueError(f"{name!r} is read-only: it cannot be filled")
    try:
        return torch.utils.dlpack.from_dlpack(given)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name!r} has no memory that torch can fill: {error}") from error
