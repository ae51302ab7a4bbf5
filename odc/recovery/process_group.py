"""The default process group of a generation, made such that the end of a rank holds no other up.

gloo connects two ranks in a wait that nothing but the group's timeout ends, half an hour. So making the group connects
none (TORCH_GLOO_LAZY_INIT); then a thread has all pairs connect, and is left behind if a rank ends meanwhile. Once two
ranks are connected, the end of one breaks the other's collective at once.

On devices it does not: NCCL's kernel waits for the lost rank for ever, and whoever waits for the device waits with it.
So a thread watches the ranks, and has NCCL abort. A collective that was aborted gives any values, and no error:
`GenerationGroup.settle` says whether there was one.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist

from odc.deadlines import LOSS_POLL_S, NCCL_POLL_S, Deadline
from odc.errors import OdcError, PeerLostError, WaitTimeoutError
from odc.fsdp._torch_groups import NCCL, abort_nccl, keep_for_ever
from odc.fsdp.rejoin import aborted_by_another, announce_rank
from odc.net.store import clone_of
from odc.recovery.generations import PREFIX, EndWatch, GenerationOver, Generations
from odc.settings import Settings
from odc.worker import Job, in_background

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_rank: int | None = None  # in the newest generation of this process


class GenerationGroup:
    """What watches the process group of a generation, until `close`; with `nccl`, from a thread of its own.

    Attributes:
        cut_short: whether collectives have been aborted.
    """

    def __init__(self, generations: Generations, *, nccl: bool) -> None:
        self._generations, self._aborting = generations, threading.Lock()
        self._closed, self.cut_short = threading.Event(), False
        if nccl:
            in_background("odc-nccl", self._watch)

    def _watch(self) -> None:
        while not self._closed.wait(NCCL_POLL_S):
            if not aborted_by_another() and not self._given_up():
                continue
            with self._aborting:
                if not self._closed.is_set():
                    self.cut_short = True  # before: whoever finds the device at rest finds out why
                    abort_nccl()
            return

    def _given_up(self) -> bool:
        """Whether the generation is, as far as the ranks' processes and the store show; the store may not answer."""
        try:
            return self._generations.culprit(self._refuse) is not None
        except GenerationOver:
            return True
        except OdcError:  # the training thread raises it
            return False

    def _refuse(self) -> None:
        """End a call of the store, which may be on a host that is cut off, once it is not needed any more."""
        if self._closed.is_set() or aborted_by_another():
            raise GenerationOver

    def settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait until the devices of `tensors` have done all that they were asked for, in any stream.

        Raises GenerationOver if a collective has been aborted: then what they hold may be of it.
        """
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        if self.cut_short:
            raise GenerationOver

    def close(self) -> None:
        """The generation is left: watch no more. Waits for an abort that is under way. Idempotent."""
        with self._aborting:
            self._closed.set()


def make_group(
    store: Any, generations: Generations, device: torch.device | None, settings: Settings | None
) -> GenerationGroup:
    """Make the default process group of the generation that was entered, and wait until all its ranks are connected.

    With a `device`, NCCL has the collectives of devices; gloo, as on the CPU, where ranks may share one, which NCCL
    refuses.

    Raises GenerationOver when the generation is given up meanwhile, PeerLostError if a connection fails, which is
    mostly the same, WaitTimeoutError after their `patience_s`.
    """
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    rank, world, stores = generations.rank, generations.world, cast(Any, dist)
    # A thread that is left behind may wait for a rank's address, and hold the connection until then.
    prefixed = stores.PrefixStore(f"{PREFIX}{generations.generation}", clone_of(store) or store)
    nccl = device is not None and not generations.share_devices
    if nccl:  # else its own watchdog ends a rank that survives, at the first error of a connection to the lost one
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    hook = sys.excepthook
    dist.init_process_group(_backend(nccl=nccl), store=prefixed, rank=rank, world_size=world)
    sys.excepthook = _naming(rank, hook)
    try:
        announce_rank(generations.patience_s, settings)
        _await_connected(generations, device if nccl else None)
    except BaseException:
        keep_for_ever()
        raise
    return GenerationGroup(generations, nccl=nccl)


def _backend(*, nccl: bool) -> str:
    """The group's, by device where there are GPUs: called "gloo", it would have torch make another one for a mesh."""
    return f"cpu:gloo,cuda:{NCCL if nccl else 'gloo'}" if torch.cuda.is_available() else "gloo"


def _naming(rank: int, hook: Hook) -> Hook:
    """`hook` for uncaught errors, such that each line begins with this rank. Torch's does that, but there would be one
    more of it in each generation, with the rank that this process had then.
    """
    global _rank
    named, _rank = _rank is not None, rank

    def with_rank(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as text:
            hook(kind, error, trace)
        lines = text.getvalue().split("\n")
        sys.stderr.write("\n".join(f"[rank{_rank}]: {line}" if line else "" for line in lines))
        sys.stderr.flush()

    return hook if named else with_rank


def _await_connected(generations: Generations, device: torch.device | None) -> None:
    rank, watch = generations.rank, EndWatch(generations)
    connected = Job(functools.partial(_connect, generations.world, device))
    in_background("odc-connect", connected.run)
    deadline = Deadline(generations.patience_s)
    while not connected.over(LOSS_POLL_S):
        watch.refuse()
        if deadline.passed():
            raise WaitTimeoutError(
                f"rank {rank}, in generation {generations.generation}, connecting to all ranks for torch's "
                f"collectives: it has not been done in {deadline.timeout_s:g} s"
            )
    try:
        connected.wait()
    except RuntimeError as error:
        raise PeerLostError(f"rank {rank}, connecting to all ranks for torch's collectives: {error}") from error


def _connect(world: int, device: torch.device | None) -> None:
    dist.all_to_all_single(torch.empty(world), torch.empty(world))
    if device is not None:  # NCCL makes a communicator at its first use
        torch.cuda.set_device(device)  # of this thread, which ends here
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.current_stream(device).synchronize()
