from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from support.members import F32, HeapGroup

from odc import deadlines
from odc.deadlines import Backoff, last_in_chain
from odc.errors import PeerLostError, WaitTimeoutError
from odc.memory import Attachment
from odc.protocol import Waiter, Word
from odc.settings import Settings

EPOCH = 7
REASON = "rank 16 fell over"
Script = Callable[[float], None]


class Clock:
    """Stands in for `time`: sleeping moves it, and a script looks on."""

    def __init__(self) -> None:
        self.now, self.script = 1000.0, list[Script]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for step in self.script:
            step(self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadlines, "time", clock)
    return clock


@pytest.fixture
def group() -> Iterator[HeapGroup]:
    with HeapGroup([[("w", 4, F32)]], 3, settings=Settings(timeout_s=10.0)) as group:
        group.attach()
        yield group


@pytest.fixture
def waiter(group: HeapGroup) -> Waiter:
    return waiter_of(group, 0)


def waiter_of(group: HeapGroup, member: int) -> Waiter:
    """Of a member in epoch 7."""
    group.layouts[member].mine.board.store(Word.PUBLISHED, EPOCH)
    return group.members[member].protocol.waiter


def never() -> bool:
    return False


def test_what_is_ready_is_not_waited_for(group: HeapGroup, waiter: Waiter, clock: Clock) -> None:
    waiter.until(lambda: True, 1, "nothing")
    assert clock.now == 1000.0


def test_a_stuck_peer_is_named_at_the_deadline(group: HeapGroup, waiter: Waiter, clock: Clock) -> None:
    group.layouts[2].peer(2).board.store(Word.PUBLISHED, 6)
    group.layouts[2].peer(2).board.store(Word.DONE, 5)
    with pytest.raises(WaitTimeoutError) as caught:
        waiter.until(never, 2, "rank 16 to publish epoch 7")
    assert 1010.0 < clock.now < 1010.1, "not at the deadline"
    text = str(caught.value)
    assert text.startswith("rank 10 (epoch 7), waiting for rank 16 to publish epoch 7: rank 16 has not called")
    assert "for 10 s (it published epoch 6 and is done with epoch 5)" in text
    assert caught.value.culprit == 16


def test_a_deadline_ends_the_job_everywhere_and_blames_the_stuck_rank(
    group: HeapGroup, waiter: Waiter, clock: Clock
) -> None:
    """Else the ranks that wait for this one would name it, which only was the first to notice."""
    with pytest.raises(WaitTimeoutError) as caught:
        waiter.until(never, 2, "rank 16 to publish epoch 7")
    for member, layout in enumerate(group.layouts):
        assert layout.peer(member).board.load(Word.ABORT) == 1 + 16
        assert layout.peer(member).reason == str(caught.value)
    with pytest.raises(PeerLostError) as error:
        waiter_of(group, 1).check("computing")
    assert error.value.culprit == 16


def test_a_peer_that_waits_itself_is_not_to_blame(group: HeapGroup, waiter: Waiter, clock: Clock) -> None:
    """The deadlines of all ranks may run out at the same moment, because of one rank."""
    group.layouts[2].peer(2).board.store(Word.WAITING, 1 + 13)
    with pytest.raises(
        WaitTimeoutError, match="rank 16 has not called .*, and waits itself for rank 13; raise"
    ) as caught:
        waiter.until(never, 2, "rank 16 to publish epoch 7")
    assert caught.value.culprit == 13
    assert [layout.peer(member).board.load(Word.ABORT) for member, layout in enumerate(group.layouts)] == [1 + 13] * 3


def test_a_rank_that_was_never_reached_is_blamed_without_asking_it(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Rank 13 waits for rank 16, which has not come up: to attach to it now would be another wait."""
    connect = HeapGroup._connect

    def only_to_thirteen(group: HeapGroup, member: int) -> Attachment:
        if member == 2:
            raise PeerLostError("rank 16 does not answer", culprit=16)
        return connect(group, member)

    monkeypatch.setattr(HeapGroup, "_connect", only_to_thirteen)
    with HeapGroup([[("w", 4, F32)]], 3, settings=Settings(timeout_s=10.0)) as group:
        group.layouts[1].peer(1).board.store(Word.WAITING, 1 + 16)
        with pytest.raises(WaitTimeoutError, match="rank 13 has not called .*, and waits itself for rank 16") as caught:
            waiter_of(group, 0).until(never, 1, "rank 13 to publish epoch 7")
        assert caught.value.culprit == 16


@pytest.mark.parametrize("waits_for", [10, 16, 99])
def test_ranks_that_wait_for_each_other_or_for_none_of_these_end_the_search(
    waits_for: int, group: HeapGroup, waiter: Waiter, clock: Clock
) -> None:
    group.layouts[2].peer(2).board.store(Word.WAITING, 1 + waits_for)
    with pytest.raises(WaitTimeoutError) as caught:
        waiter.until(never, 2, "rank 16 to publish epoch 7")
    assert caught.value.culprit == 16


def test_progress_of_the_peer_starts_the_deadline_anew(group: HeapGroup, waiter: Waiter, clock: Clock) -> None:
    board = group.layouts[1].peer(1).board
    steps = itertools.count(1)

    def every_nine_seconds(now: float, next_at: list[float] = [1009.0]) -> None:  # noqa: B006  # kept between calls
        if now >= next_at[0] and next_at[0] < 1040.0:
            board.store(Word.PROGRESS, next(steps))
            next_at[0] += 9.0

    clock.script.append(every_nine_seconds)
    with pytest.raises(WaitTimeoutError):
        waiter.until(never, 1, "something")
    assert 1046.0 < clock.now < 1046.1, "the last progress was at 36 s"


def test_progress_of_another_rank_does_not_help(group: HeapGroup, waiter: Waiter, clock: Clock) -> None:
    board, steps = group.layouts[2].peer(2).board, itertools.count(1)
    clock.script.append(lambda now: board.store(Word.PROGRESS, next(steps)))
    with pytest.raises(WaitTimeoutError):
        waiter.until(never, 1, "something")
    assert clock.now < 1010.1


@pytest.mark.parametrize("whose", ["own", "of the peer"])
def test_an_abort_ends_the_wait(group: HeapGroup, waiter: Waiter, clock: Clock, whose: str) -> None:
    member = 0 if whose == "own" else 1
    layout = group.layouts[member]

    def abort(now: float) -> None:
        if now > 1003.0:
            layout.peer(member).set_reason(REASON)
            layout.peer(member).board.store(Word.ABORT, 1 + 16)

    clock.script.append(abort)
    with pytest.raises(PeerLostError) as caught:
        waiter.until(never, 1, "rank 13 to finish epoch 7")
    assert clock.now < 1003.1, "an abort is seen at the next look"
    assert str(caught.value) == (
        "rank 10 (epoch 7), waiting for rank 13 to finish epoch 7: the job was aborted by rank 16: rank 16 fell over"
    )
    assert caught.value.culprit == 16


@pytest.mark.parametrize("state", ["ended its last one", "runs one"])
def test_a_rank_that_ran_fewer_minibatches_may_have_forgotten_the_block(
    group: HeapGroup, waiter: Waiter, clock: Clock, state: str
) -> None:
    board = group.layouts[1].peer(1).board
    board.store(Word.PUBLISHED, EPOCH - 1)
    board.store(Word.DONE, EPOCH - 1 if state == "ended its last one" else EPOCH - 2)
    with pytest.raises(WaitTimeoutError) as caught:
        waiter.until(never, 1, "something")
    assert ("outside of `with model.minibatch():` each backward is one" in str(caught.value)) == (state != "runs one")


def test_an_aborted_job_does_nothing_more_even_if_it_could(group: HeapGroup, waiter: Waiter) -> None:
    group.members[0].protocol.abort("no more", 13)
    with pytest.raises(PeerLostError, match="aborted by rank 13: no more"):
        waiter.until(lambda: True, 1, "something")
    with pytest.raises(
        PeerLostError, match=r"^rank 10 \(epoch 7\), fetching: the job was aborted by rank 13: no more$"
    ):
        waiter.check("fetching")


def test_an_abort_may_have_no_reason(group: HeapGroup, waiter: Waiter) -> None:
    group.layouts[0].peer(0).board.store(Word.ABORT, 1)
    with pytest.raises(PeerLostError, match="aborted by rank 0: no reason given"):
        waiter.check("computing")


def test_a_peer_that_left_is_named(group: HeapGroup, waiter: Waiter, clock: Clock) -> None:
    clock.script.append(lambda now: group.layouts[1].peer(1).board.store(Word.LEFT, int(now > 1001.0)))
    with pytest.raises(
        PeerLostError, match="waiting for rank 13 to finish epoch 7: rank 13 has left the job"
    ) as caught:
        waiter.until(never, 1, "rank 13 to finish epoch 7")
    assert clock.now < 1001.1
    assert caught.value.culprit == 13


def test_a_peer_that_did_its_part_and_left_is_no_error(group: HeapGroup, waiter: Waiter, clock: Clock) -> None:
    """The word and LEFT both appear between a look at the word and the look at LEFT."""
    board, looks = group.layouts[1].peer(1).board, itertools.count()

    def ready() -> bool:
        if next(looks) < 100:
            return False
        was = board.load(Word.DONE) >= 1
        board.store(Word.DONE, 1)
        board.store(Word.LEFT, 1)
        return was

    waiter.until(ready, 1, "rank 13 to finish epoch 1")
    assert clock.now < 1010.0


def test_the_board_shows_the_awaited_rank_and_since_which_epoch(group: HeapGroup, waiter: Waiter, clock: Clock) -> None:
    own, seen = group.layouts[0].peer(0).board, list[tuple[int, int]]()
    clock.script.append(lambda now: seen.append((own.load(Word.WAITING), own.load(Word.WAITING_EPOCH))))
    looks = itertools.count()
    waiter.until(lambda: next(looks) > 50, 1, "something")
    assert set(seen) == {(1 + 13, EPOCH)}
    assert own.load(Word.WAITING) == 0
    with pytest.raises(WaitTimeoutError):
        waiter.until(never, 2, "something")
    assert own.load(Word.WAITING) == 0, "also after an error"


def test_a_signal_as_a_wait_begins_leaves_none_on_the_board(group: HeapGroup) -> None:
    """Peers whose deadline passes would have blamed the rank that this one no longer waits for."""
    noted = list[int | None]()

    def note(rank: int | None) -> None:
        noted.append(rank)
        if rank is not None:
            raise KeyboardInterrupt

    waiter = Waiter(group.layouts[0], lambda reason, culprit: None, note, lambda: None)
    with pytest.raises(KeyboardInterrupt):
        waiter.until(never, 1, "something")
    assert noted == [13, None]


# what every wait is made of ------------------------------------------------------------------------------------------


def test_pauses_grow_up_to_the_longest_and_begin_again(clock: Clock) -> None:
    backoff, slept = Backoff(1.0, 3.0, growth=2.0, yields=2), list[float]()
    clock.script.append(lambda now: slept.append(now - 1000.0 - sum(slept)))
    yielding = []
    for _ in range(5):
        backoff.sleep()
        yielding.append(backoff.yielding)
    assert slept == [0.0, 0.0, 1.0, 2.0, 3.0]
    assert yielding == [True, True, False, False, False]
    backoff.restart()
    assert [backoff.advance() for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("waits_for", "culprit"),
    [({}, 1), ({1: 2}, 2), ({1: 2, 2: 3}, 3), ({1: 0}, 1), ({1: 2, 2: 1}, 2), ({1: 1}, 1)],
)
def test_the_last_of_a_chain_is_to_blame(waits_for: dict[int, int], culprit: int) -> None:
    assert last_in_chain(1, 0, waits_for.get) == culprit
