from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
from support.members import F32, Crew

from odc.errors import PeerLostError, WaitTimeoutError
from odc.memory import Attachment
from odc.runtime import Waiter, Word, read_reason
from odc.runtime import wait as wait_module
from odc.settings import Settings
from odc.trace import WAIT, recorder

EPOCH = 7
REASON = b"rank 16 fell over\0"
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
    monkeypatch.setattr(wait_module, "time", clock)
    return clock


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew([[("w", 4, F32)]], 3, settings=Settings(timeout_s=10.0)) as crew:
        crew.attach()
        yield crew


@pytest.fixture
def waiter(crew: Crew) -> Waiter:
    return Waiter(crew.spaces[0], lambda: EPOCH)


def never() -> bool:
    return False


def test_what_is_ready_is_not_waited_for(crew: Crew, waiter: Waiter, clock: Clock) -> None:
    waiter.until(lambda: True, 1, "nothing")
    assert clock.now == 1000.0


def test_a_stuck_peer_is_named_at_the_deadline(crew: Crew, waiter: Waiter, clock: Clock) -> None:
    crew.spaces[2].board(2).store(Word.PUBLISHED, 6)
    crew.spaces[2].board(2).store(Word.DONE, 5)
    with pytest.raises(WaitTimeoutError) as caught:
        waiter.until(never, 2, "rank 16 to publish epoch 7")
    assert 1010.0 < clock.now < 1010.1, "not at the deadline"
    text = str(caught.value)
    assert text.startswith("rank 10 (epoch 7), waiting for rank 16 to publish epoch 7: rank 16 has not called")
    assert "for 10 s (it published epoch 6 and is done with epoch 5)" in text
    assert caught.value.culprit == 16


def test_a_deadline_ends_the_job_everywhere_and_blames_the_stuck_rank(crew: Crew, waiter: Waiter, clock: Clock) -> None:
    """Else the ranks that wait for this one would name it, which only was the first to notice."""
    with pytest.raises(WaitTimeoutError) as caught:
        waiter.until(never, 2, "rank 16 to publish epoch 7")
    for member, space in enumerate(crew.spaces):
        assert space.board(member).load(Word.ABORT) == 1 + 16
        assert read_reason(space, member) == str(caught.value)
    with pytest.raises(PeerLostError) as told:
        Waiter(crew.spaces[1], lambda: EPOCH).check("computing")
    assert told.value.culprit == 16


def test_a_peer_that_waits_itself_is_not_to_blame(crew: Crew, waiter: Waiter, clock: Clock) -> None:
    """Everybody's deadline may run out at the same moment, for one rank's sake."""
    crew.spaces[2].board(2).store(Word.WAITING, 1 + 13)
    with pytest.raises(
        WaitTimeoutError, match="rank 16 has not called .*, and waits itself for rank 13; raise"
    ) as caught:
        waiter.until(never, 2, "rank 16 to publish epoch 7")
    assert caught.value.culprit == 13
    assert [space.board(member).load(Word.ABORT) for member, space in enumerate(crew.spaces)] == [1 + 13] * 3


def test_a_rank_that_was_never_reached_is_blamed_without_asking_it(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Rank 13 waits for rank 16, which has not come up: to attach to it now would be another wait."""
    connect = Crew._connect

    def only_to_thirteen(crew: Crew, member: int) -> Attachment:
        if member == 2:
            raise PeerLostError("rank 16 does not answer", culprit=16)
        return connect(crew, member)

    monkeypatch.setattr(Crew, "_connect", only_to_thirteen)
    with Crew([[("w", 4, F32)]], 3, settings=Settings(timeout_s=10.0)) as crew:
        crew.spaces[1].board(1).store(Word.WAITING, 1 + 16)
        with pytest.raises(WaitTimeoutError, match="rank 13 has not called .*, and waits itself for rank 16") as caught:
            Waiter(crew.spaces[0], lambda: EPOCH).until(never, 1, "rank 13 to publish epoch 7")
        assert caught.value.culprit == 16


@pytest.mark.parametrize("waits_for", [10, 16, 99])
def test_ranks_that_wait_for_each_other_or_for_none_of_these_end_the_search(
    waits_for: int, crew: Crew, waiter: Waiter, clock: Clock
) -> None:
    crew.spaces[2].board(2).store(Word.WAITING, 1 + waits_for)
    with pytest.raises(WaitTimeoutError) as caught:
        waiter.until(never, 2, "rank 16 to publish epoch 7")
    assert caught.value.culprit == 16


def test_progress_of_the_peer_starts_the_deadline_anew(crew: Crew, waiter: Waiter, clock: Clock) -> None:
    board = crew.spaces[1].board(1)
    steps = itertools.count(1)

    def every_nine_seconds(now: float, next_at: list[float] = [1009.0]) -> None:  # noqa: B006  # kept between calls
        if now >= next_at[0] and next_at[0] < 1040.0:
            board.store(Word.PROGRESS, next(steps))
            next_at[0] += 9.0

    clock.script.append(every_nine_seconds)
    with pytest.raises(WaitTimeoutError):
        waiter.until(never, 1, "something")
    assert 1046.0 < clock.now < 1046.1, "the last progress was at 36 s"


def test_progress_of_another_rank_does_not_help(crew: Crew, waiter: Waiter, clock: Clock) -> None:
    board, steps = crew.spaces[2].board(2), itertools.count(1)
    clock.script.append(lambda now: board.store(Word.PROGRESS, next(steps)))
    with pytest.raises(WaitTimeoutError):
        waiter.until(never, 1, "something")
    assert clock.now < 1010.1


@pytest.mark.parametrize("whose", ["own", "of the peer"])
def test_an_abort_ends_the_wait(crew: Crew, waiter: Waiter, clock: Clock, whose: str) -> None:
    member = 0 if whose == "own" else 1
    space = crew.spaces[member]

    def abort(now: float) -> None:
        if now > 1003.0:
            space.reason(member)[: len(REASON)].numpy()[:] = list(REASON)
            space.board(member).store(Word.ABORT, 1 + 16)

    clock.script.append(abort)
    with pytest.raises(PeerLostError) as caught:
        waiter.until(never, 1, "rank 13 to finish epoch 7")
    assert clock.now < 1003.1, "an abort is seen at the next look"
    assert str(caught.value) == (
        "rank 10 (epoch 7), waiting for rank 13 to finish epoch 7: the job was aborted by rank 16: rank 16 fell over"
    )
    assert caught.value.culprit == 16


def test_an_aborted_job_does_nothing_more_even_if_it_could(crew: Crew, waiter: Waiter) -> None:
    crew.verbs[0].abort("no more", 13)
    with pytest.raises(PeerLostError, match="aborted by rank 13: no more"):
        waiter.until(lambda: True, 1, "something")
    with pytest.raises(
        PeerLostError, match=r"^rank 10 \(epoch 7\), fetching: the job was aborted by rank 13: no more$"
    ):
        waiter.check("fetching")


def test_an_abort_without_a_reason_says_so(crew: Crew, waiter: Waiter) -> None:
    crew.spaces[0].board(0).store(Word.ABORT, 1)
    with pytest.raises(PeerLostError, match="aborted by rank 0: no reason given"):
        waiter.check("computing")


def test_a_peer_that_left_is_named(crew: Crew, waiter: Waiter, clock: Clock) -> None:
    clock.script.append(lambda now: crew.spaces[1].board(1).store(Word.LEFT, int(now > 1001.0)))
    with pytest.raises(
        PeerLostError, match="waiting for rank 13 to finish epoch 7: rank 13 has left the job"
    ) as caught:
        waiter.until(never, 1, "rank 13 to finish epoch 7")
    assert clock.now < 1001.1
    assert caught.value.culprit == 13


def test_a_peer_that_did_its_part_and_left_is_no_error(crew: Crew, waiter: Waiter, clock: Clock) -> None:
    """The word and LEFT both appear between a look at the word and the look at LEFT."""
    board, looks = crew.spaces[1].board(1), itertools.count()

    def ready() -> bool:
        if next(looks) < 100:
            return False
        was = board.load(Word.DONE) >= 1
        board.store(Word.DONE, 1)
        board.store(Word.LEFT, 1)
        return was

    waiter.until(ready, 1, "rank 13 to finish epoch 1")
    assert clock.now < 1010.0


def test_the_board_says_for_whom_and_since_which_epoch(crew: Crew, waiter: Waiter, clock: Clock) -> None:
    own, seen = crew.spaces[0].board(0), list[tuple[int, int]]()
    clock.script.append(lambda now: seen.append((own.load(Word.WAITING), own.load(Word.WAITING_EPOCH))))
    looks = itertools.count()
    waiter.until(lambda: next(looks) > 50, 1, "something")
    assert set(seen) == {(1 + 13, EPOCH)}
    assert own.load(Word.WAITING) == 0
    with pytest.raises(WaitTimeoutError):
        waiter.until(never, 2, "something")
    assert own.load(Word.WAITING) == 0, "also after an error"


def test_a_wait_is_recorded_with_its_peer_and_lane(crew: Crew, waiter: Waiter) -> None:
    recorder().clear()
    go = threading.Event()
    threading.Timer(0.02, go.set).start()
    waiter.until(go.is_set, 2, "something", lane="push")
    (span,) = recorder().spans()
    assert (span.category, span.peer, span.lane) == (WAIT, 16, "push")
