"""What odc hooks into a process that shards a model: optimizer steps, gradient clipping, and how the process ends.

A step or clipping inside an unfinished minibatch is an error (docs/protocol.md, "Boundaries"). An error that ends the
process reaches the peers as the reason of their abort: `sys.excepthook` and `threading.excepthook` see an uncaught one,
a wrapper of `sys.exit` one that a program has caught, and a finalizer of `multiprocessing` the one in flight in a child
process. A bare `raise SystemExit(1)` outside `multiprocessing` cannot be seen.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from odc.deadlines import COLLECTIVES_END_S, STORE_ENDING_S
from odc.errors import OdcError, culprit_of
from odc.fsdp import _torch_clip, _torch_groups
from odc.fsdp.module import OdcModule
from odc.fsdp.refusals import NOT_SHARDED
from odc.fsdp.root import live_roots
from odc.net import JobStore, announce_failure
from odc.net.liveness import Liveness, Loss
from odc.protocol import RootState, Word
from odc.runtime import abort_arenas, report_to_hosts
from odc.worker import in_background

_process = 0  # in which the hooks were installed; they do nothing in its forked children
_store: weakref.ref[Any] | None = None  # of the job; weak, so that it does not outlive its process group
_rank = 0
_exit_reason: tuple[str, int, int] | None = None  # text, culprit, and _progress() when sys.exit was called
_guarding = False
_OF_GLOO = ("gloo", "pair closure")  # in its errors: the file that they come from, or the end of connections
_lost: Loss | None = None  # the first rank that was, in this job


def guard_steps() -> None:
    """Refuse steps and clipping inside unfinished minibatches, from the first call on."""
    global _guarding
    if not _guarding:
        # Also where a program compiles its step or clipping: traced, they would have weak dictionaries as input.
        register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))
        _torch_clip.install(torch.compiler.disable(_before_clip))
        _guarding = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stepped, changed = {id(p) for p in parameters}, {id(p) for p in parameters if p.grad is not None}
    for root in live_roots():
        if not root.minibatch.may_step and root.holds_any(stepped):
            root.minibatch.before_step()
        if root.holds_any(changed):
            root.member.protocol.note_step()


def _before_clip(doing: str, parameters: list[torch.Tensor]) -> None:
    unfinished = [root for root in live_roots() if root.minibatch.state is not RootState.CLOSED]
    clipped = {id(parameter) for parameter in parameters} if unfinished else set()
    for root in unfinished:
        if root.holds_any(clipped):
            root.minibatch.refuse_unfinished(doing)


def watch_exit(store: Any, rank: int) -> None:
    """Watch how this process ends, from now on; called by each `fully_shard` of a new job."""
    global _process, _store, _rank, _lost
    if _store is None or _store() is not store:
        _lost = None
    _store, _rank = weakref.ref(store), rank
    if _process == os.getpid():
        return
    if not _process:  # a forked child has inherited the hooks
        _install_hooks()
    _process = os.getpid()
    if multiprocessing.parent_process() is not None:
        # It runs while an error raised by the child's function is still in flight.
        multiprocessing.util.Finalize(None, _child_ends, exitpriority=100)


def _install_hooks() -> None:
    uncaught, in_thread, exit_ = sys.excepthook, threading.excepthook, sys.exit

    def on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        advise(error)
        if not hasattr(sys, "ps1"):  # an interactive session goes on
            report(error)
            _write_for_launcher(error)
        uncaught(kind, error, trace)

    def on_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.thread is not None and args.exc_type is not SystemExit:
            report(args.exc_value, args.thread.ident)
        in_thread(args)

    def on_exit(status: Any = None, /) -> NoReturn:
        global _exit_reason
        if status not in (None, 0):
            _exit_reason = (*_described(sys.exception() or SystemExit(status)), _progress())
        exit_(status)

    sys.excepthook, threading.excepthook = on_uncaught, on_uncaught_in_thread
    sys.exit = on_exit


def advise(error: BaseException) -> None:
    """Add the cure to an error of `model.minibatch()` and the like on a module that was never sharded. Name the lost
    rank in an error of torch's collectives that follows from it.
    """
    if isinstance(error, AttributeError) and isinstance(error.obj, nn.Module) and hasattr(OdcModule, error.name or ""):
        error.add_note(f"This {type(error.obj).__name__} {NOT_SHARDED}")
    if (lost := _lost_behind(error)) is not None:
        error.add_note(f"Rank {lost.rank} was lost before: {lost.text()}")


def _lost_behind(error: BaseException) -> Loss | None:
    """The rank whose loss an error of one of torch's collectives follows from, if one is lost."""
    of_collective = isinstance(error, dist.DistError) or any(word in str(error) for word in _OF_GLOO)
    return _lost if of_collective and isinstance(error, RuntimeError) and not isinstance(error, OdcError) else None


def end_collectives_at_a_loss(liveness: Liveness) -> None:
    """From now on end what gloo waits for where a rank is lost: no packet comes of a host without power, and gloo would
    wait for half an hour. The waits of odc, whose errors say more, end before.
    """
    liveness.follow("collectives", functools.partial(_end_collectives, liveness))


def _end_collectives(liveness: Liveness, loss: Loss) -> None:
    """On the daemon's thread; does not wait."""
    if loss.rank == liveness.rank:
        return
    if loss.certain:
        _note_loss(loss)

    def end() -> None:  # never in the next generation of the job: it has another daemon, and other groups
        if loss.certain or any(root.member.protocol.board.load(Word.ABORT) for root in live_roots()):
            _note_loss(loss)
            groups = _torch_groups.gloo_groups(loss.rank)
            in_background("odc-gloo", lambda: _close(groups))

    liveness.later(end, COLLECTIVES_END_S)


def _note_loss(loss: Loss) -> None:
    global _lost
    _lost = _lost or loss


def _close(groups: list[Any]) -> None:
    for group in groups:
        with contextlib.suppress(KeyError, ValueError):  # it has been destroyed since
            _torch_groups.close_connections(group)


def _child_ends() -> None:
    error = sys.exception()
    if isinstance(error, SystemExit):
        error = None if error.code in (None, 0) else error.__context__ or error
    if error is not None:
        report(error)


def report(error: BaseException, thread: int | None = None) -> None:
    """Abort this process's roots with `error` as the reason. Never raises; waits 2 s at most, for the job's store.

    `thread` is the ident of the thread that it has ended: only the roots that were made there are aborted.
    """
    _abort(*_described(error), thread)


def _write_for_launcher(error: BaseException) -> None:
    """Write the error into the file that torchrun's last message quotes, unless torch's `record` has."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if _process != os.getpid() or not path or os.path.exists(path):
        return
    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": _described(error)[0], "extraInfo": extra}}))


def _abort(reason: str, culprit: int, thread: int | None = None) -> None:
    if _process != os.getpid():
        return
    with contextlib.suppress(Exception):  # an error here must not replace the user's
        roots = [root for root in live_roots() if thread in (None, root.thread)]
        for root in roots:
            root.member.protocol.abort(f"{reason} (in or after epoch {root.minibatch.epoch})", culprit)
        if thread is None:
            abort_arenas(reason, culprit)
        store = _store() if _store is not None else None
        if store is not None and (roots or thread is None):
            report_to_hosts(reason, culprit)
            announce_failure(JobStore(store, STORE_ENDING_S), reason, culprit)


def ended_by_error() -> bool:
    """Whether an error ends this process, as far as can be seen; its roots are aborted then. For `shutdown`."""
    error = sys.exception()
    if error is not None:
        report(error)
        return True
    # If odc was called after sys.exit, that was caught, and the process went on.
    if _exit_reason is not None and _exit_reason[2] == _progress():
        _abort(*_exit_reason[:2])
        return True
    return any(root.member.protocol.board.load(Word.ABORT) for root in live_roots())


def last_error() -> str:
    """The error that an interactive session or a test runner showed last, if any; it may not be why this rank ends."""
    error = getattr(sys, "last_value", None)
    return "" if error is None else _described(error)[0]


def _described(error: BaseException) -> tuple[str, int]:
    """(the reason that peers get, the culprit) of an error.

    Code that runs a rank may fail as it handles an error of odc's, as `mp.spawn` does where no file can be opened: the
    reason then names both.
    """
    reason, handled = f"{type(error).__name__}: {error}", _handled(error)
    while handled is not None and not isinstance(error, OdcError):
        if isinstance(handled, OdcError):
            reason += f" (while handling {type(handled).__name__}: {handled})"
            break
        handled = _handled(handled)
    if handled is None and (lost := _lost_behind(error)) is not None:
        return f"{reason} (rank {lost.rank} was lost before: {lost.text()})", lost.culprit
    return reason, culprit_of(error, _rank)


def _handled(error: BaseException) -> BaseException | None:
    """The error during whose handling `error` was raised, unless that was to be hidden."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _progress() -> int:
    return sum(root.member.protocol.board.load(Word.PROGRESS) for root in live_roots())
