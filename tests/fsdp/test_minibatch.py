from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.machines import LAYOUT, Rank, finish, states
from support.members import HeapGroup

from odc.errors import OdcError, PeerLostError, UnsupportedError
from odc.fsdp import _torch_compat as compat
from odc.fsdp.minibatch import Minibatch
from odc.protocol import RootState, Word
from odc.settings import Settings
from odc.trace import WINDOW, Recorder

pytestmark = pytest.mark.usefixtures("queued")

# whole minibatches ---------------------------------------------------------------------------------------------------


def test_gradients_are_the_sum_over_all_pushes_divided_by_the_ranks(two: list[Rank]) -> None:
    for rank in two:
        rank.machine.begin()
    two[0].push(0, 1.0)
    two[0].push(0, 2.0)
    two[1].push(0, 5.0, (0,))
    assert states(two) == [RootState.OPEN] * 2
    finish(two)
    for rank in two:
        assert rank.grads() == [[4.0] * 4, [1.5] * 2, None]
    assert states(two) == [RootState.CLOSED] * 2
    assert [rank.machine.epoch for rank in two] == [1, 1]


def test_a_gradient_without_an_accumulator_is_refused_before_any_of_its_unit_is_sent() -> None:
    with HeapGroup(LAYOUT, 2, settings=Settings(timeout_s=0.1), frozen={"b"}) as group:
        two = [Rank(group, 0), Rank(group, 1)]
        for rank in two:
            rank.machine.begin()
        with pytest.raises(UnsupportedError, match=r"rank 10 \(epoch 1\): b has a gradient, but was frozen"):
            two[0].push(0, 7.0)
        two[0].push(0, 1.0, (0,))
        two[1].push(1, 2.0)
        finish(two)
        for rank in two:
            assert rank.grads() == [[0.5] * 4, None, [1.0] * 3]


def test_nothing_of_one_minibatch_is_left_in_the_next(two: list[Rank]) -> None:
    for unit in (0, 1, 0):
        for rank in two:
            rank.machine.begin()
        two[0].push(unit, 2.0)
        finish(two)
        used = [[1.0] * numel if u == unit else None for u, layout in enumerate(LAYOUT) for _, numel, _ in layout]
        assert [rank.grads() for rank in two] == [used, used]


def test_a_rank_without_microbatches_opens_the_minibatch_when_it_finishes(two: list[Rank]) -> None:
    for epoch in range(1, 4):
        two[1].machine.done()
        assert states(two)[1] is RootState.FINISHING
        two[0].push(0, 4.0)
        two[0].machine.done()
        two[0].machine.collect()
        two[1].machine.collect()
        assert two[1].grads() == [[2.0] * 4, [2.0] * 2, None]
        assert two[1].machine.epoch == epoch


def waits_for(group: HeapGroup, member: int, peer: int, until: Future[None]) -> bool:
    """Whether `member` shows on its board that it waits for `peer`, before its call `until` ends."""
    board = group.layouts[member].peer(member).board
    while board.load(Word.WAITING) != 1 + group.ranks[peer]:
        if until.done():
            return False
        time.sleep(0.001)
    return True


def test_a_replica_is_read_only_when_its_server_has_added_everything() -> None:
    """Members 0 and 2 hold the same shard; what member 3 pushed to member 2 stays in its slots for a while."""
    with HeapGroup(LAYOUT, 2, replicas=2, settings=Settings(timeout_s=3600.0)) as group, ThreadPoolExecutor(2) as pool:
        ranks = [Rank(group, member) for member in range(4)]
        for rank in ranks:
            rank.machine.begin()
        for rank, value in zip(ranks, [1.0, 2.0, 4.0, 8.0], strict=True):
            group.by_hand = rank.me == 3
            rank.push(0, value)
        for rank in ranks:
            rank.machine.done()
        fast, slow = (pool.submit(ranks[member].machine.collect) for member in (0, 2))
        waited = waits_for(group, 0, 2, fast), waits_for(group, 2, 2, slow)
        assert group.layouts[2].peer(2).board.load(Word.COMPLETE) == 0, "member 2 announced sums that lack a push"
        group.drain(2)
        fast.result()
        slow.result()
        assert waited == (True, True)
        assert [ranks[member].grads() for member in (0, 2)] == [[[3.75] * 4, [3.75] * 2, None]] * 2


# begin ---------------------------------------------------------------------------------------------------------------


def test_begin_publishes_the_shards_of_now_and_only_once(two: list[Rank]) -> None:
    layout = two[1].heaps.layouts[1]
    two[0].groups[1].odc_params[0].values.fill_(3.0)
    two[0].machine.begin()
    two[0].groups[1].odc_params[0].values.fill_(4.0)
    two[0].machine.begin()
    assert layout.peer(0).published(layout.units[1], 0).tolist() == [3.0] * 3
    assert layout.peer(0).board.load(Word.PUBLISHED) == 1


@pytest.mark.parametrize("use", ["begin", "publish"])
def test_nothing_begins_while_a_graph_is_captured(two: list[Rank], use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device; on the CPU there are no graphs, and torch is not asked."""
    machine = two[0].machine
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(True) or True)
    getattr(machine, use)()
    assert machine.epoch == 1 and not asked
    machine.close_evaluation("the test")
    monkeypatch.setattr(machine._member.layout.heap, "device", torch.device("cuda", 0))
    refused = r"^rank \d+ \(epoch 1\): a CUDA graph is being captured.*ignored_params.*set_keep_unsharded_storage"
    with pytest.raises(UnsupportedError, match=refused):
        getattr(machine, use)()
    assert machine.epoch == 1, "nothing was opened"


def test_begin_waits_until_no_rank_reads_the_last_epoch(two: list[Rank]) -> None:
    for rank in two:
        rank.machine.begin()
    two[0].machine.close_evaluation("step")
    with two[0].heaps.late("rank 10 .*waiting for rank 13 to finish epoch 1"):
        two[0].machine.begin()
    assert states(two) == [RootState.CLOSED, RootState.OPEN]
    two[1].machine.close_evaluation("step")
    two[0].machine.begin()
    assert two[0].machine.epoch == 2


def test_begin_counts_microbatches_anew_and_is_progress(two: list[Rank]) -> None:
    board = two[0].heaps.layouts[0].peer(0).board
    board.store(Word.MICROBATCH, 5)
    two[0].machine.begin()
    two[0].machine.begin()
    assert board.load(Word.MICROBATCH) == 0
    assert board.load(Word.PROGRESS) == 2


# the end of a backward -----------------------------------------------------------------------------------------------


def test_the_last_group_ends_the_minibatch_after_the_backward(
    two: list[Rank], queued: list[Callable[[], None]]
) -> None:
    rank, (first, second) = two[0], two[0].groups
    rank.machine.begin()
    rank.machine.finalized(first)  # type: ignore[arg-type]
    rank.machine.finalized(first)  # type: ignore[arg-type]
    assert states(two)[0] is RootState.OPEN and not queued, "torch finalizes the root before the others' left-overs"
    rank.machine.finalized(second)  # type: ignore[arg-type]
    assert states(two)[0] is RootState.FINISHING
    rank.machine.finalized(second)  # type: ignore[arg-type]
    assert len(queued) == 1, "no rank is waited for inside the backward, and torch 2.11 names a unit twice"
    for group in rank.groups:
        assert group.calls == ["finalize", "drop", "reshard"]


def test_a_part_of_a_unit_ends_no_minibatch_outside_of_a_backward(
    two: list[Rank], queued: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline's stage that reduces there calls torch's final callback next, which ends the minibatch."""
    monkeypatch.setattr(two[0].iteration, "is_last_backward", lambda: True)
    two[0].machine.begin()
    two[0].machine.partial_backward()
    assert states(two)[0] is RootState.OPEN and not queued


def test_every_peer_is_attached_before_this_ranks_part_is_over(
    two: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer may end right after it has seen DONE; its words must be in reach by then."""
    rank, seen = two[0], list[bool]()
    endpoint, heap = rank.heaps.members[0], rank.heaps.layouts[0].heap
    done = endpoint.done
    monkeypatch.setattr(endpoint, "done", lambda *how: (seen.append(heap.attached(1)), done(*how)))
    rank.machine.begin()
    assert not heap.attached(1)
    rank.machine.done()
    assert seen == [True]


def test_each_minibatch_needs_all_its_groups_again(two: list[Rank]) -> None:
    for _ in range(2):
        for rank in two:
            rank.machine.begin()
            rank.machine.finalized(rank.groups[0])  # type: ignore[arg-type]
            assert rank.machine.state is RootState.OPEN
            rank.machine.finalized(rank.groups[1])  # type: ignore[arg-type]
        for rank in two:
            rank.machine.collect()


def test_collect_waits_for_every_rank_and_for_its_server(two: list[Rank]) -> None:
    for rank in two:
        rank.machine.begin()
    two[0].heaps.by_hand = True
    two[1].push(0, 1.0)
    with pytest.raises(OdcError, match=r"rank 10: collect\(\) without done\(\) in epoch 1"):
        two[0].machine.collect()
    two[0].machine.done()
    with two[0].heaps.late("rank 13 to finish epoch 1"):
        two[0].machine.collect()
    assert states(two)[0] is RootState.FAILED
    two[0].machine._set(RootState.FINISHING)
    two[1].machine.done()
    with two[0].heaps.late("this rank's server to add what rank 13 pushed"):
        two[0].machine.collect()
    two[0].machine._set(RootState.FINISHING)
    assert two[0].grads() == [None, None, None]
    two[0].heaps.drain(0)
    two[0].machine.collect()
    assert two[0].grads() == [[0.5] * 4, [0.5] * 2, None]


# abort ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "culprit"),
    [(ValueError("bad batch"), 10), (PeerLostError("gone", culprit=13), 13), (OdcError("odd"), 10)],
)
def test_an_error_reaches_every_rank_with_its_culprit(two: list[Rank], error: Any, culprit: int) -> None:
    two[0].heaps.attach()
    two[0].machine.begin()
    two[0].machine.abort(error)
    layout = two[1].heaps.layouts[1]
    assert layout.peer(1).board.load(Word.ABORT) == 1 + culprit
    assert layout.peer(1).reason == f"{type(error).__name__} in epoch 1: {error}"
    with pytest.raises(PeerLostError, match=f"aborted by rank {culprit}"):
        two[1].machine.begin()


# the trace -----------------------------------------------------------------------------------------------------------


def test_a_frozen_model_that_stays_in_an_evaluation_hides_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the reference model of reinforcement learning, which is run between the minibatches of the trained one."""
    own = Recorder()
    monkeypatch.setattr(sys.modules[Minibatch.__module__], "recorder", lambda: own)
    every = {name for unit in LAYOUT for name, _, _ in unit}
    with HeapGroup(LAYOUT, 1, frozen=every) as reference, HeapGroup(LAYOUT, 1) as trained:
        Rank(reference, 0).machine.begin()
        rank = Rank(trained, 0)
        rank.machine.begin()
        finish([rank])
    assert [span.epoch for span in own.spans() if span.category == WINDOW] == [1]


def test_an_evaluation_is_in_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of a minibatch in the same epoch, nor of another model while a teacher only evaluates."""
    own = Recorder()
    monkeypatch.setattr(sys.modules[Minibatch.__module__], "recorder", lambda: own)
    with HeapGroup(LAYOUT, 1) as unfrozen, HeapGroup(LAYOUT, 1) as trained:
        teacher, rank = Rank(unfrozen, 0), Rank(trained, 0)
        with torch.no_grad():
            teacher.machine.begin()
            rank.machine.begin()
        evaluated = own.now()
        rank.machine.begin()
        finish([rank])
        with torch.inference_mode():
            rank.machine.begin()
        rank.machine.close_evaluation("step")
        with torch.no_grad():
            rank.machine.begin()
        monkeypatch.setattr(compat, "is_in_backward", lambda: True)
        with torch.no_grad():  # as autograd runs a backward, in which a unit of this epoch may be fetched first
            rank.machine.begin()
        finish([rank])
    windows = [span for span in own.spans() if span.category == WINDOW]
    assert [window.epoch for window in windows] == [1, 3]
    assert windows[0].start_ns >= evaluated


def test_after_publish_the_window_begins_at_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may publish for readers outside the job, and wait for them; that is no part of its minibatch."""
    own = Recorder()  # other tests leave windows open
    monkeypatch.setattr(sys.modules[Minibatch.__module__], "recorder", lambda: own)
    with HeapGroup(LAYOUT, 1) as group:
        rank = Rank(group, 0)
        rank.machine.publish()
        waited = own.now()
        rank.machine.begin()
        finish([rank])
        rank.machine.begin()
        rank.machine.publish()
        rank.machine.close_evaluation("step")
        windows = [span for span in own.spans() if span.category == WINDOW]
    assert [window.epoch for window in windows] == [1]
    assert windows[0].start_ns >= waited


# what a signal's handler raises --------------------------------------------------------------------------------------


def interrupt(patch: pytest.MonkeyPatch, owner: object, name: str, *, after: bool) -> None:
    """What `name` is called for is done or not, then the handler raises, once."""
    call = getattr(owner, name)

    def interrupted(*given: Any) -> None:
        patch.setattr(owner, name, call)
        if after:
            call(*given)
        raise KeyboardInterrupt

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("end", ["done", "close_evaluation"])
def test_a_signal_at_the_end_ends_the_job_once_peers_act_on_this_ranks_part(
    two: list[Rank], monkeypatch: pytest.MonkeyPatch, end: str, after: bool
) -> None:
    """Given up after DONE, no peer would learn of it; used after it, shards would change below this rank's reads."""
    for rank in two:
        rank.heaps.attach()
        rank.machine.begin()
    interrupt(monkeypatch, two[0].heaps.members[0].protocol, "close", after=after)
    machine = two[0].machine
    with pytest.raises(KeyboardInterrupt):
        machine.done() if end == "done" else machine.close_evaluation("the test")
    assert states(two)[0] is (RootState.FAILED if after else RootState.OPEN)
    if after:
        with pytest.raises(PeerLostError, match="aborted by rank 10: KeyboardInterrupt in epoch 1"):
            two[1].machine.begin()
        return
    machine.explicit = True
    machine.abandon("interrupted")
    for rank in two:
        rank.machine.done()
    assert [str(rank.machine.collect()).count("interrupted") for rank in two] == [1, 1]


@pytest.mark.parametrize("after", [False, True])
def test_a_signal_at_the_begin_ends_the_job_once_peers_see_the_epoch(
    two: list[Rank], monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """The next begin would wait for the end of this epoch, and the peers for that of this rank's part."""
    two[0].heaps.attach()
    interrupt(monkeypatch, two[0].heaps.members[0].protocol, "end_publishing", after=after)
    with pytest.raises(KeyboardInterrupt):
        two[0].machine.begin()
    if after:
        assert states(two)[0] is RootState.FAILED
        with pytest.raises(PeerLostError, match="aborted by rank 10: KeyboardInterrupt in epoch 1"):
            two[1].machine.begin()
        return
    for rank in two:
        rank.machine.begin()
    two[0].push(0, 2.0)
    finish(two)
    assert [rank.grads() for rank in two] == [[[1.0] * 4, [1.0] * 2, None]] * 2
