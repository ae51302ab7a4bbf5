"""How a thread waits: a time limit that progress renews, pauses that grow between two checks, and every fixed time.

The table holds, in seconds, the times of `net`, `protocol`, `hosts`, `runtime` and `fsdp` that no setting changes.
Those that users may set, and their defaults, are in odc/settings.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# The job's store.
STORE_POLL_S, STORE_LONGEST_POLL_S = 0.002, 0.02  # between two checks for a key that another rank sets
STORE_LEAST_S = 5.0  # the least deadline of a call, however short the user's: the store serves all ranks of the job
STORE_ENDING_S = 2.0  # the deadline of a call by a rank that an error ends, or that reports a loss
STORE_CHECK_S = 0.1  # between two checks, while a call takes long, of why its caller should wait no longer
STORE_FIRST_PROBE_S = 0.5  # of a call, before the store's address is probed
STORE_PROBE_S = 1.0  # the deadline of a probe
STORE_DEATH_S, STORE_DEATH_POLL_S = (
    1.0,
    0.01,
)  # for the death of the store's host to show once a call has failed

# NVSHMEM.
NVSHMEM_END_S = 30.0  # for all ranks to end it together, which is tidy and nothing else

# The end of a job.
COLLECTIVES_END_S = 2.0  # for the waits of odc to end for a lost rank, before those of torch's collectives

# Recovery.
MEMBERS_LEAST_S = 60.0  # for ranks that are there to connect, to read what others keep, to be ready
LOSS_SHOWS_S, LOSS_POLL_S = 5.0, 0.01  # for the end of a rank to show, after an error that may be its consequence
ENDED_LONGEST_POLL_S = 0.5  # between two checks in the store whether a generation has ended, while a rank waits
RESTART_FIRST_PAUSE_S, RESTART_LONGEST_PAUSE_S = 0.25, 30.0  # before a rank is started again that did nothing before
NCCL_POLL_S = 0.2  # between two checks whether a collective on a device waits for a rank that has ended
STATE_POLL_S, STATE_LONGEST_POLL_S = 0.001, 0.05  # between two checks whether a rank on another host shows its state

# Messages through the job's store.
MAIL_FIRST_SLEEP_S, MAIL_LONGEST_SLEEP_S = 2e-4, 2e-2  # between two checks for what a member sends or takes
MAIL_TICK_S = 0.2  # between two reports of progress
MAIL_ALONE_S = 86_400.0  # for the first member to come back from work that it does alone

# Connections between processes of one host.
CONVERSATION_S = 2.0  # for the other end's part of a request or a handshake, on one host and between hosts
ACCEPT_PAUSE_S = 0.1  # without a descriptor to accept a connection with
LISTENER_RETRY_S = 0.002  # between two tries while a listener's queue is full
ATTACH_CHECK_S = 1.0  # between two checks of ABORT while a peer's listener does not answer
PROCESS_POLL_S = 0.2  # between two checks of a process where the kernel refuses pidfds
DAEMON_JOIN_S = 5.0  # for the daemon's loop to end
ALIVE_CHECK_S = 0.05  # between two checks that a thread which ends a wait still lives
RELEASE_FIRST_CHECK_S, RELEASE_LONGEST_CHECK_S = 1e-3, 0.05  # between two checks whether a peer needs a heap
RELEASE_JOIN_S = 3.0  # for the thread that releases heaps to end

# Connections between hosts.
CONNECT_S = 30.0  # for a live rank to answer: its daemon may wait for the interpreter lock
CONNECT_FIRST_PAUSE_S, CONNECT_LONGEST_PAUSE_S = 0.002, 1.0  # between two tries to connect
PROBE_S = 1  # between two probes of an idle connection; the kernel takes whole seconds
ENGINE_LONGER_S = 7.7  # by which engines' connections outlive the links, whose end has a reason
LINK_SEND_S = 2.7  # for a full buffer to empty, beyond `lost_after_s`: the other host's daemon may have been stopped
LINK_REFRESH_S = 0.25  # between two sendings of the words that others read only when they have waited for long
LINK_FIRST_PAUSE_S, LINK_LONGEST_PAUSE_S = 1e-4, 0.05  # between two checks for room in the other end's buffer
READ_CHECK_S = 0.5  # between two checks of ABORT and the deadline while a read waits
POOL_CHECK_S = 1.0  # between two checks of the deadline while all connections to a rank are in use
NIXL_FIRST_SLEEP_S, NIXL_LONGEST_SLEEP_S = 20e-6, 500e-6  # between two checks of a transfer that is due

# Words of the protocol.
WORD_FIRST_SLEEP_S, WORD_LONGEST_SLEEP_S = 50e-6, 1e-3  # between two checks of a word that nothing wakes for
WORD_LONGEST_OVER_HOSTS_S = 2e-3  # the same over hosts: a network is slower
DRAIN_FIRST_SLEEP_S, DRAIN_LONGEST_SLEEP_S = 50e-6, 1e-3  # of the daemon, between two checks of a device that adds
WORD_SLEEP_S = 0.1  # between two checks of ABORT and the deadline where the rank that stores the word ends the sleep
REASON_S = 5.0  # by which a link may notice an end later than a read does, on a busy host
REASON_POLL_S, REASON_LONGEST_POLL_S = 0.005, 0.05  # between two checks for that reason


class Deadline:
    """A time limit that starts anew whenever the awaited peer makes progress: whenever the value `progress` changes."""

    def __init__(self, timeout_s: float, progress: object = None) -> None:
        self.timeout_s = timeout_s
        self._begin, self._progress = time.monotonic(), progress

    def passed(self, progress: object = None) -> bool:
        """Whether `timeout_s` have gone by since the construction, or since the last call that brought a new value."""
        now = time.monotonic()
        if progress != self._progress:
            self._begin, self._progress = now, progress
        return now - self._begin >= self.timeout_s

    def remaining(self) -> float:
        """Seconds that are left, 0 or less once it has passed."""
        return self._begin + self.timeout_s - time.monotonic()


class Backoff:
    """Pauses between two checks: `yields` times the thread only yields, then each sleep is `growth` times the last."""

    def __init__(self, first_s: float, longest_s: float, *, growth: float = 1.5, yields: int = 0) -> None:
        self._first_s, self._longest_s, self._growth = first_s, longest_s, growth
        self._next_s, self._yields = first_s, yields
        self.yielding = yields > 0  # whether the last pause was not a sleep

    def sleep(self) -> None:
        if self._yields > 0:
            self._yields -= 1
            time.sleep(0)
            return
        self.yielding = False
        time.sleep(self.advance())

    def advance(self) -> float:
        """Seconds of the next sleep, for a caller that has another way to sleep."""
        pause, self._next_s = self._next_s, min(self._next_s * self._growth, self._longest_s)
        return pause

    def restart(self) -> None:
        self._next_s = self._first_s


def last_in_chain(member: int, me: int, waits_for: Callable[[int], int | None]) -> int:
    """The member to blame if `member` is late: the end of the chain of waits that begins there.

    `waits_for` returns None for a member that waits for no other.
    """
    seen = {me, member}
    while (following := waits_for(member)) is not None and following not in seen:
        seen.add(following)
        member = following
    return member
