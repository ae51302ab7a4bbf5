"""How ranks meet: threads stand for ranks, in a store of this process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from odc.deadlines import ENDED_LONGEST_POLL_S
from odc.errors import OdcError, WaitTimeoutError
from odc.fsdp import default_store
from odc.fsdp._torch_groups import DEFAULT_PREFIX
from odc.net import JobStore, announce_failure
from odc.net.announced import failure
from odc.recovery import arrivals, process_group
from odc.recovery import generations as module
from odc.recovery.generations import EndWatch, GenerationOver, Generations
from odc.recovery.members import Agreed, Held, MemberList, NothingKeptError, Presence, Share, newest_common

HERE = "this host"


def presence(held: dict[int, list[int]]) -> Presence:
    return Presence(1, HERE, {Share(0, rank): Held([3, 4], steps) for rank, steps in held.items()})


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=5), st.data())
def test_the_newest_step_of_all_is_agreed(kept: list[tuple[int, bool]], data: st.DataObject) -> None:
    """Ranks are at step `e` or `e + 1`, as the end of a minibatch has it; some slots are being written."""
    base = data.draw(st.integers(0, 9))
    steps = {rank: [base, base + 1] if ahead else [base] for rank, (_, ahead) in enumerate(kept)}
    holders = [presence({rank: steps[rank] for rank in data.draw(st.sets(st.sampled_from(sorted(steps))))})]
    holders.append(presence(steps))
    expected = base + 1 if all(ahead for _, ahead in kept) else base
    assert newest_common(holders, {0: len(kept)}, 0) == Agreed(0, expected)


def test_at_the_beginning_there_is_nothing_to_go_back_to() -> None:
    assert newest_common([presence({}), presence({})], {0: 2}, None) is None
    # Rank 1 builds what it had at the beginning.
    assert newest_common([presence({0: [30]}), presence({1: []})], {0: 2}, 30) is None
    assert newest_common([presence({0: [30]}), presence({1: [30]})], {0: 2}, 30) == Agreed(0, 30)


def test_a_state_that_no_process_holds_any_more_is_named() -> None:
    with pytest.raises(NothingKeptError, match="rank 0 4 and 5, rank 1 none; no process lives that held the others"):
        newest_common([presence({0: [4, 5]}), presence({})], {0: 2}, 0)
    with pytest.raises(NothingKeptError, match="rank 0 4, rank 1 6 and 7"):
        newest_common([presence({0: [4]}), presence({1: [6, 7]})], {0: 2}, 0)


def test_a_presence_travels_whole() -> None:
    one = presence({0: [1, 2], 3: []})
    assert Presence.decode(one.encode().encode()) == one


@pytest.fixture
def store() -> Any:
    made: Any = dist
    return made.HashStore()


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """What each returned or raised."""
    found: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            found[i] = calls[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return found


def enter(one: Generations, held: dict[Share, Held] | None = None) -> Any:
    one.enter(lambda: held or {})
    return one.presences


def test_a_job_that_is_past_its_beginning_does_not_begin_again(store: Any) -> None:
    ranks = [Generations(store, rank, 2, 60.0) for rank in range(2)]
    assert [one.begin_at(0) for one in ranks] == [0, 0]
    assert in_threads(*(lambda one=one: one.enter(dict) for one in ranks)) == [None, None]
    ranks[1].leave()
    ranks[1].pass_first()
    found = in_threads(*(lambda one=one: one.enter(dict) for one in ranks))
    assert [type(one) for one in found] == [NothingKeptError] * 2


def test_ranks_meet_and_show_what_they_hold(store: Any) -> None:
    ranks = [Generations(store, rank, 3, 60.0) for rank in range(3)]
    shown = {Share(0, 1): Held([7, 8])}
    found = in_threads(*(lambda one=one: enter(one, shown if one.rank == 1 else None) for one in ranks))
    assert found[0] == found[1] == found[2]
    assert found[0][1].held == shown
    assert found[0][0].pid == os.getpid()
    assert [one.generation for one in ranks] == [0, 0, 0]
    at = in_threads(*(lambda one=one: one.ready("ready", Held([one.rank])) for one in ranks))
    assert [{rank: held.fds for rank, held in one.items()} for one in at] == [{0: [0], 1: [1], 2: [2]}] * 3


@pytest.mark.parametrize(("devices", "shared"), [(["GPU-a", "GPU-b"], False), (["GPU-a", "GPU-a"], True)])
def test_ranks_know_whether_two_train_on_one_device(store: Any, devices: list[str], shared: bool) -> None:
    ranks = [Generations(store, rank, 2, 60.0, device=device) for rank, device in enumerate(devices)]
    in_threads(*(lambda one=one: enter(one) for one in ranks))
    assert [one.share_devices for one in ranks] == [shared] * 2


def test_the_place_of_another_process_is_taken_in_the_next_generation(store: Any) -> None:
    first = [Generations(store, rank, 2, 60.0) for rank in range(2)]
    in_threads(*(lambda one=one: enter(one) for one in first))
    replacement = Generations(store, 1, 2, 60.0)
    with pytest.raises(GenerationOver):
        enter(replacement)
    assert first[0].culprit() == 1
    # Where the process group of that generation looks, for ranks of other hosts that wait there.
    culprit, reason = failure(JobStore(store, 60.0, prefix=f"{module.PREFIX}0/0//")) or (None, "")
    assert (culprit, reason) == (1, "another process has the place of rank 1")
    in_threads(lambda: enter(replacement), lambda: enter(first[0]))
    assert first[0].generation == replacement.generation == 1
    assert first[0].culprit() is None


def test_a_process_whose_place_another_has_taken_ends(store: Any) -> None:
    """Two processes of a rank would take the place from each other for ever."""
    one = Generations(store, 0, 1, 60.0)
    enter(one)
    one.leave()
    store.set(f"{module.PREFIX}1/present/0", Presence(1, "another", {}).encode())
    with pytest.raises(OdcError, match=rf"rank 0 has two processes: 1 of another host .* {os.getpid()}, which lives"):
        enter(one)


def test_a_generation_is_given_up_once(store: Any) -> None:
    ranks = [Generations(store, rank, 2, 60.0) for rank in range(2)]
    in_threads(*(lambda one=one: enter(one) for one in ranks))
    for one in ranks:  # both have noticed
        one.leave()
    assert int(store.get(module.PREFIX + "generation")) == 1


def in_turn(one: Generations) -> None:
    enter(one)
    one.ready("ready", Held([]))


def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("point", ["present", "ready"])
def test_the_end_of_a_rank_gives_the_generation_up(store: Any, point: str) -> None:
    one, pid = Generations(store, 0, 3, 60.0), ended()
    for rank in (1, 2) if point == "ready" else (1,):  # else rank 2 is still to come
        gone = Presence(pid if rank == 1 else os.getpid(), module.host_identity(), {})
        store.set(f"{module.PREFIX}0/present/{rank}", gone.encode())
    with pytest.raises(GenerationOver):
        in_turn(one)
    assert int(store.get(module.PREFIX + "generation")) == 1


def test_the_end_of_a_rank_on_another_host_that_is_announced_gives_the_generation_up(store: Any) -> None:
    one = Generations(store, 0, 2, 60.0)
    group = dist.PrefixStore("0/", dist.PrefixStore(f"{module.PREFIX}0", store))  # type: ignore[attr-defined]
    timer = threading.Timer(0.1, lambda: announce_failure(JobStore(group, 60.0), "rank 1 died", 1))
    timer.start()
    with pytest.raises(GenerationOver):
        enter(one)
    timer.join()


def test_a_process_group_has_its_keys_where_generations_look(store: Any) -> None:
    made: Any = dist
    dist.init_process_group("gloo", store=made.PrefixStore("here", store), rank=0, world_size=1)
    try:
        default_store().set("key", "value")
    finally:
        dist.destroy_process_group()
    assert store.check([f"here/{DEFAULT_PREFIX}key"])


def test_a_newer_generation_ends_the_wait(store: Any) -> None:
    one = Generations(store, 0, 2, 60.0)
    timer = threading.Timer(0.1, lambda: store.set(module.PREFIX + "generation", "3"))
    with pytest.raises(GenerationOver):
        one.enter(lambda: timer.start() or {})  # type: ignore[func-returns-value]
    timer.join()


def test_ranks_that_do_not_come_are_named(store: Any) -> None:
    one = Generations(store, 1, 4, 0.2)
    store.set(f"{module.PREFIX}0/present/3", presence({}).encode())
    with pytest.raises(
        WaitTimeoutError, match=r"rank 1, in generation 0, waiting for ranks \[0, 2\] .* for 0\.2 s"
    ) as late:
        enter(one)
    assert late.value.culprit == 0


def test_no_process_enters_a_job_that_is_over(store: Any) -> None:
    ranks = [Generations(store, rank, 2, 60.0) for rank in range(2)]
    in_threads(*(lambda one=one: enter(one) for one in ranks))
    in_threads(*(one.finish for one in ranks))
    with pytest.raises(OdcError, match="rank 1 has nothing to go on with: the job has kept its last step"):
        enter(Generations(store, 1, 2, 60.0))


def test_what_a_process_holds_that_does_not_take_part_does_not_count(store: Any) -> None:
    """Its host is not whole; no member could read what it alone has kept of the last step."""
    all_four = MemberList(0, (0, 1, 2, 3))
    for key, value in {"generation": "1", "0/members": all_four.encode(), "members": all_four.encode()}.items():
        store.set(module.PREFIX + key, value)
    alone = {Share(0, rank): Held([], [4, 5]) for rank in (2, 3)}
    store.set(f"{module.PREFIX}1/present/2", Presence(os.getpid(), "another host", alone).encode())
    ranks = [Generations(store, place, 4, 5.0, fewest=2) for place in (0, 1)]
    mine = {Share(0, rank): Held([], [4, 5] if rank < 2 else [4]) for rank in range(4)}
    found = in_threads(*(lambda one=one: one.enter(lambda: mine) for one in ranks))
    assert found == [Agreed(0, 4)] * 2
    assert [one.members for one in ranks] == [MemberList(1, (0, 1))] * 2


def test_at_the_start_of_a_job_a_late_rank_is_waited_for(store: Any) -> None:
    """Its process may still import; the patience for replacements is for ranks that have been there."""
    ranks = [Generations(store, place, 2, 0.1, fewest=1) for place in (0, 1)]

    def late() -> Any:
        time.sleep(0.5)
        return ranks[1].enter(dict)

    assert in_threads(lambda: ranks[0].enter(dict), late) == [None, None]
    assert [one.members for one in ranks] == [MemberList(0, (0, 1))] * 2


def test_a_job_is_not_over_while_a_rank_that_had_come_to_its_end_is_replaced(store: Any) -> None:
    one = Generations(store, 0, 2, 60.0)
    in_threads(lambda: enter(one), lambda: enter(Generations(store, 1, 2, 60.0)))
    store.set(f"{module.PREFIX}0/over/1", '{"fds": [], "steps": []}')
    store.set(module.PREFIX + "generation", "1")  # a rank that waited for this one has seen the other end
    with pytest.raises(GenerationOver):
        one.finish()
    assert store.get(module.PREFIX + "generation") == b"1"


def test_ranks_that_have_ended_since_the_job_was_over_are_not_lost(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One looks for the others just before the last of them comes, and for the dead just after that has ended."""
    ranks = [Generations(store, place, 2, 60.0) for place in range(2)]
    in_threads(*(lambda one=one: enter(one) for one in ranks))
    looks: list[int] = []

    def culprit() -> int | None:
        if looks:
            return 1
        looks.append(1)
        ranks[1].finish()  # finds that rank 0 has come, and ends
        return 1

    monkeypatch.setattr(ranks[0], "culprit", culprit)
    ranks[0].finish()
    with pytest.raises(OdcError, match="the job has kept its last step, and is over"):
        enter(Generations(store, 1, 2, 60.0))


class Calls:
    """The calls that any `JobStore` makes of its store, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        call = JobStore._call

        def counted(store: JobStore, name: str, *arguments: Any) -> Any:
            self.made.append(name)
            return call(store, name, *arguments)

        monkeypatch.setattr(JobStore, "_call", counted)


class Pauses:
    """In the place of `Deadline` where a generation's end is checked: `passed` are its answers, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, passed: Callable[[], bool]) -> None:
        self.seconds: list[float] = []

        def made(seconds: float) -> Any:
            self.seconds.append(seconds)
            return SimpleNamespace(passed=passed)

        monkeypatch.setattr(module, "Deadline", made)


class Ending:
    """A generation that ends at the `last` check of this host's processes; counts them, and those of the store."""

    rank, world, generation, patience_s = 0, 2, 0, 600.0

    def __init__(self, last: int) -> None:
        self._last, self.here, self.anywhere, self.left = last, 0, 0, False

    def lost_here(self) -> int | None:
        self.here += 1
        return 1 if self.here == self._last else None

    def culprit(self) -> int | None:
        self.anywhere += 1
        return None

    def leave(self) -> None:
        self.left = True


def test_ranks_that_wait_for_each_other_ask_the_store_few_times(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 processes the first is late: neither does the number of calls of a check grow with theirs, nor that of all
    that show what they hold at last.
    """
    one, there = Generations(store, 255, 256, 600.0), Presence(os.getpid(), HERE, {})
    for place in range(1, 255):
        store.set(f"{module.PREFIX}0/present/{place}", there.encode())
    polls, calls, pauses = list[float](), Calls(monkeypatch), Pauses(monkeypatch, lambda: len(pauses.seconds) == 1)

    def late(backoff: arrivals.Backoff) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        polls.append(1.0)
        if len(polls) == 30:
            store.set(f"{module.PREFIX}0/present/0", there.encode())

    monkeypatch.setattr(arrivals.Backoff, "sleep", late)
    assert len(enter(one)) == 256
    assert len(polls) == 30
    assert len(calls.made) < 60, "30 checks of the first key, 9 of the others', and some before and after"
    assert calls.made.count("multi_get") == 1


def test_a_rank_that_has_come_after_one_that_is_missing_is_seen_at_the_deadline(store: Any) -> None:
    """It is no missing one, and the deadline begins anew; rank 0 alone does not come."""
    one = Generations(store, 1, 4, 0.2)
    looked = list[int]()
    see = one._see

    def seen(place: int, text: bytes) -> Presence:
        looked.append(place)
        return see(place, text)

    one._see = seen  # type: ignore[method-assign]
    for place in (2, 3):
        store.set(f"{module.PREFIX}0/present/{place}", presence({}).encode())
    with pytest.raises(WaitTimeoutError, match=r"waiting for ranks \[0\] to meet"):
        enter(one)
    assert looked == [1, 2, 3]


def test_a_process_that_joins_takes_part_though_another_has_not_come(store: Any) -> None:
    """Places 0 and 1 took part last; 3 has come to join, 2 has not."""
    store.set(module.PREFIX + "members", MemberList(0, (0, 1)).encode())
    store.set(f"{module.PREFIX}0/present/3", Presence(os.getpid(), module.host_identity(), {}).encode())
    ranks = [Generations(store, place, 4, 30.0, fewest=1) for place in (0, 1)]
    in_threads(*(lambda one=one: enter(one) for one in ranks))
    assert [one.members.places for one in ranks] == [(0, 1, 3)] * 2


def test_the_end_of_a_generation_is_looked_for_in_the_store_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, pauses = Ending(40), Pauses(monkeypatch, lambda: True)
    generations: Any = ending
    watch = EndWatch(generations)
    for _ in range(39):
        watch.refuse()
    assert (ending.here, ending.anywhere) == (39, 39)
    assert pauses.seconds == sorted(pauses.seconds) and pauses.seconds[-1] == ENDED_LONGEST_POLL_S
    with pytest.raises(GenerationOver):
        watch.refuse()
    assert ending.left and ending.anywhere == 39, "the end of a process of this host shows without the store"


def test_ranks_that_connect_check_processes_more_often_than_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, pauses, release = Ending(20), Pauses(monkeypatch, lambda: len(pauses.seconds) == 1), threading.Event()
    monkeypatch.setattr(process_group, "_connect", lambda world, device: release.wait(60))
    generations: Any = ending
    with pytest.raises(GenerationOver):
        process_group._await_connected(generations, None)
    release.set()
    assert ending.left and (ending.here, ending.anywhere) == (20, 1)
