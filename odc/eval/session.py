"""`session`: the span of an evaluation, in which a failing rank ends all others, and which all ranks leave together.

The only barrier is at the exit: ranks may have any number of requests of any kind, including zero, and under odc a rank
that is done early keeps serving the shards its peers still fetch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc.errors import OdcError, PeerLostError
from odc.eval.peers import Peers
from odc.fsdp import live_roots, root_of, sharded_tops
from odc.net import JobStore
from odc.net.announced import announce_process
from odc.runtime import refuse_losses
from odc.settings import LONGEST_TIMEOUT_S

_MARK = "_is_fsdp_managed_module"  # torch's, by which transformers knows a sharded model


@contextlib.contextmanager
def session(
    group: dist.ProcessGroup | None = None, *, modules: Iterable[nn.Module] = (), timeout_s: float = 600.0
) -> Iterator[Peers]:
    """Evaluate inside it, on every rank of the group: `with odc.eval.session(modules=[model]) as peers: ...`.

    Calls no collective. An exception that leaves the block ends every wait of the other ranks in this session, and
    their next forward of one of `modules`, with a PeerLostError that names the first rank that failed and why. Without
    an exception, the block ends for all ranks together.

    Args:
        group: the ranks that evaluate together; None takes the world, or just this process without torch.distributed.
            A sharded model's ranks outside of it call `model.publish()` once, for which the others wait.
        modules: the models to evaluate, or modules that hold them. What odc has sharded there publishes its shards
            first, so that even a rank without requests serves its peers, and generates `unsynced`. Each of their
            forwards counts as progress.
        timeout_s: how many seconds to wait for a rank that makes no progress: no forward, nothing sent, no
            `peers.tick()`. Then WaitTimeoutError names it.

    Raises PeerLostError if another rank failed, one of this host has ended, or the job of a sharded model was aborted;
    OdcError if this process is not in the group.
    """
    peers = _join(group, timeout_s)
    hooks = contextlib.ExitStack()
    held = list(modules)  # a shard is served while its module lives
    with hooks:
        try:
            tops = [sharded_tops(module) for module in held]
            published = list(dict.fromkeys(root for roots in tops for root in roots))
            for root in published:  # all, before a wait for any: ranks may have them in another order
                root_of(root).minibatch.close_evaluation("publish()")
            for root in published:
                root.publish()
            for module, roots in zip(held, tops, strict=True):
                if roots:
                    hooks.enter_context(unsynced(module))
                tick = torch.compiler.disable(lambda *_: peers.tick())  # not compiled, even in a compiled module
                ticking: set[Any] = {module, *roots, *_generating(module)}
                for one in ticking:
                    hooks.callback(one.register_forward_pre_hook(tick).remove)
            yield peers
            peers.leave("the end of the evaluation")
        except BaseException as error:
            failed = None
            with contextlib.suppress(OdcError):  # the store is gone, and with it the job; no other rank can be blamed
                failed = peers.fail(error)
            if failed is not None and isinstance(error, Exception) and not isinstance(error, PeerLostError):
                _blame(peers, error, *failed)
            raise


@contextlib.contextmanager
def unsynced(module: nn.Module) -> Iterator[None]:
    """Inside, transformers' `generate` of `module`, and of every module in it, does not keep ranks in step.

    By default it all-reduces a flag for each token of a sharded model, so that all ranks run equally many forwards.
    Under odc they need not, and a rank with no text left to generate would hang the others. `synced_gpus=True` in the
    call still asks for it. A session includes this.
    """
    marked = [one for one in _generating(module) if vars(one).get(_MARK)]
    for one in marked:
        setattr(one, _MARK, False)
    try:
        yield
    finally:
        for one in marked:
            setattr(one, _MARK, True)


def _generating(module: nn.Module) -> list[nn.Module]:
    return [one for one in module.modules() if callable(getattr(one, "generate", None))]


def _join(group: dist.ProcessGroup | None, timeout_s: float) -> Peers:
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise ValueError(
            f"timeout_s must be positive seconds, at most {LONGEST_TIMEOUT_S:.0f} (ten years), not {timeout_s!r}"
        )
    if group is None and not dist.is_initialized():
        return Peers(dist.HashStore(), (0,), 0, timeout_s)  # type: ignore[attr-defined]
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank() not in ranks:
        raise OdcError(f"rank {dist.get_rank()} evaluates in a group that it does not belong to: {ranks}")
    me = ranks.index(dist.get_rank())
    owner: Any = dist.group.WORLD if group is None else group
    watch = functools.partial(_refuse_abort, "entering an evaluation")
    store = JobStore(owner.get_group_store(), timeout_s, dist.get_rank(), watch=watch)
    announce_process(store, dist.get_rank())
    number = store.add(f"odc.eval/sessions/{me}", 1)  # the same on every rank: all run their sessions in one order
    return Peers(store, ranks, me, timeout_s, f"odc.eval/{number}/", check=_refuse_abort)


def _refuse_abort(doing: str) -> None:
    """Raise PeerLostError if this process has learned that the job was aborted, or a rank lost. Does not wait."""
    for root in live_roots():
        root.member.protocol.waiter.check(doing)
    refuse_losses(f"rank {dist.get_rank()}, {doing}")


def _blame(peers: Peers, error: Exception, culprit: int, reason: str) -> None:
    """Raise PeerLostError from `error` if another rank failed first: an interrupted collective is not the cause."""
    if culprit not in (peers.rank, getattr(error, "culprit", None)):
        ended = f"rank {peers.rank}, ended by {type(error).__name__}"
        raise PeerLostError(f"{ended}: rank {culprit} failed in the evaluation: {reason}", culprit=culprit) from error
