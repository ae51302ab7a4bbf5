"""For whom a reader waits, for how long, and when it is told that the job is over."""

from __future__ import annotations

import threading
import time

import pytest
from support.handover_jobs import Job

from odc.errors import PeerLostError, WaitTimeoutError
from odc.handover import Reader
from odc.protocol import Word
from odc.protocol.protocol import abort


def test_waits_for_a_version_that_is_still_to_come(job: Job) -> None:
    job.publish([1.0, 1.0])
    timer = threading.Timer(0.1, lambda: job.publish([2.0, 2.0]))
    timer.start()
    with Reader(job.handle) as source:
        assert source.read(at_least=2).version == 2
    timer.join()


def test_a_version_older_than_asked_for_is_not_given_out(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.publish([1.0, 1.0])
    job.publish([2.0, 2.0])
    with Reader(job.handle) as source:
        monkeypatch.setattr(source, "_timeout_s", 0.1)  # not before it has attached, which a busy machine may delay
        assert source.read(at_least=2).version == 2
        with pytest.raises(WaitTimeoutError, match="rank 10 to publish version 3"):
            source.read(at_least=3)


def test_a_rank_that_does_not_publish_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.publish([1.0, 1.0])
    job.group.publish(0, 2.0)
    with Reader(job.handle) as source:
        monkeypatch.setattr(source, "_timeout_s", 0.1)  # not before it has attached, which a busy machine may delay
        with pytest.raises(WaitTimeoutError, match="rank 13 to publish version 2") as caught:
            source.read()
        assert caught.value.culprit == 13


def test_progress_of_the_rank_starts_the_deadline_anew(job: Job) -> None:
    job.group.publish(0, 1.0)
    over = time.monotonic() + 3.0

    def touch() -> None:
        while time.monotonic() < over:
            job.group.members[1].protocol.touch("computing")
            time.sleep(0.02)
        job.group.publish(1, 1.0)

    thread = threading.Thread(target=touch)
    thread.start()
    with Reader(job.handle, timeout_s=2.5) as source:
        assert source.read().version == 1
    thread.join()


def test_left_and_aborted_jobs(job: Job) -> None:
    job.publish([1.0, 1.0])
    with Reader(job.handle) as source:
        job.group.layouts[1].peer(1).board.store(Word.LEFT, 1)
        with pytest.raises(PeerLostError, match="rank 13 has left the job"):
            source.read()
        abort(job.group.layouts[0], "out of memory", 13)
        with pytest.raises(PeerLostError, match="aborted by rank 13: out of memory") as caught:
            source.read()
        assert caught.value.culprit == 13


def test_a_rank_that_aborts_and_ends_while_it_is_checked_is_not_blamed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may take the core away from the reader between its two questions."""
    job.publish([1.0, 1.0])
    with Reader(job.handle) as source:

        def alive() -> bool:
            abort(job.group.layouts[1], "rank 10 died in epoch 2", 10)
            return False

        monkeypatch.setattr(source._sources[1]._process, "alive", alive)
        with pytest.raises(PeerLostError, match="aborted by rank 10: rank 10 died") as caught:
            source._sources[1].refuse_if_gone("waiting")
        assert caught.value.culprit == 10
