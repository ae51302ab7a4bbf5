"""Twin of odc/net/host_link.py, and of how an engine's connections are set: over a network that loses packets."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from support.hosts import Hosts, need_hosts

from odc.net.host_link import HostLink, side_to_blame
from odc.net.messages import StoredWord, encode
from odc.net.tcp import keep_alive, limit_calls, set_for_reader, set_for_server
from odc.protocol import Word
from odc.settings import LOST_AFTER_S

CUT_S, NEXT_PROBE_S = 1.4, 1.9  # each end probes the other after a second of silence, and a second later again
QUIET_S = 2.5  # in which a connection that is taken for dead ends
TRIES = 20


def joined(hosts: Hosts) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection from host 1 to host 0."""
    listener = hosts[0].within(lambda: socket.create_server((hosts[0].address, 0)))
    with listener:
        client = hosts[1].within(lambda: socket.create_connection(listener.getsockname(), 60.0))
        accepted, _ = listener.accept()
    client.settimeout(None)
    return client, accepted


def cut(hosts: Hosts, begin: float) -> bool:
    """Lose all packets for so long that a first probe is lost; whether they were back before the second.

    `begin` is a time before the last packet that was exchanged.
    """
    hosts.drop(1)
    time.sleep(CUT_S)
    hosts.undrop(1)
    return time.monotonic() - begin < NEXT_PROBE_S


def link(*ends: socket.socket) -> Callable[[], bool]:
    """A link; returns whether either end carries words to the other."""
    links = [HostLink(member, end) for member, end in enumerate(ends)]

    def carries() -> bool:
        assert [one.receive() for one in links] == [None, None]
        for one, other in (links, links[::-1]):
            one.send(encode(StoredWord(Word.DONE, 7)))
            while (message := other.receive()) is None:
                time.sleep(0.01)
            if not message:
                return False
        return True

    assert carries()
    return carries


def engine(reader: socket.socket, server: socket.socket) -> Callable[[], bool]:
    """An engine's connection; returns whether an answer comes."""
    set_for_reader(reader, LOST_AFTER_S)
    set_for_server(server, LOST_AFTER_S)

    def carries() -> bool:
        reader.send(b"request")
        message = b""
        while len(message) < 7:
            try:
                message += server.recv(7)
            except BlockingIOError:
                time.sleep(0.01)
        server.send(b"answer")
        return reader.recv(6, socket.MSG_WAITALL) == b"answer"

    assert carries()
    return carries


@pytest.mark.thorough
@pytest.mark.parametrize("connect", [link, engine])
def test_a_probe_that_is_lost_on_a_busy_network_is_no_death(connect: Callable[..., Callable[[], bool]]) -> None:
    need_hosts()
    with Hosts(2) as hosts:
        for _ in range(TRIES):
            client, accepted = joined(hosts)
            with client, accepted:
                begin = time.monotonic()
                carries = connect(client, accepted)
                if cut(hosts, begin):
                    time.sleep(QUIET_S)
                    assert carries()
                    return
    pytest.skip("this machine is too busy to lose one probe only")


@pytest.mark.parametrize("hosts", [2, 3, 4, 5])
def test_both_sides_of_a_cut_name_the_same(hosts: int) -> None:
    every = set(range(hosts))
    for picked in range(1, 2**hosts - 1):
        one = {host for host in every if picked >> host & 1}
        other = every - one
        named, _ = side_to_blame(one, other, 0)
        assert named == side_to_blame(other, one, 0)[0], (one, other)
        assert len(named) <= hosts / 2, "the larger side is named"
        assert len(one) != len(other) or 0 not in named


def test_a_link_that_hears_nothing_is_distinguished_from_an_idle_one() -> None:
    """So that a rank knows which other hosts are beyond a cut when the first of its links has ended."""
    need_hosts()
    with Hosts(3) as hosts:
        listener = hosts[0].within(lambda: socket.create_server((hosts[0].address, 0)))
        links = []
        with listener:
            for number in (1, 2):
                hosts[number].within(lambda: links.append(socket.create_connection(listener.getsockname(), 60.0)))
                links.append(listener.accept()[0])
        mine, one, theirs, other = (HostLink(number, end, 3.0) for number, end in enumerate(links))
        hosts.drop(2)
        while not (theirs.silent() and other.silent()):
            time.sleep(0.01)
        quiet = [not mine.silent(), not one.silent()]
        for each in (mine, one, theirs, other):
            each.close()
    assert quiet == [True, True], "an idle link whose probes are answered is taken for lost"


@pytest.mark.parametrize("lost_after_s", [1.0, 2.3, 30.0, 3600.0])
def test_what_an_engine_reads_outlives_the_links(lost_after_s: float) -> None:
    """In milliseconds: a link, an engine that reads, and one that serves, which has no user timeout but its probes."""
    sockets = [socket.socket() for _ in range(3)]
    keep_alive(sockets[0], lost_after_s)
    set_for_reader(sockets[1], lost_after_s)
    set_for_server(sockets[2], lost_after_s)
    tcp = socket.IPPROTO_TCP
    link, reader, server = (one.getsockopt(tcp, socket.TCP_USER_TIMEOUT) for one in sockets)
    idle, between, most = (
        sockets[2].getsockopt(tcp, option) for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    for one in sockets:
        one.close()
    assert link == round(lost_after_s * 1000)
    assert server == 0 and link + 5000 < reader <= 1000 * (idle + between * most)


@pytest.fixture
def joined_here() -> Iterator[tuple[HostLink, socket.socket]]:
    """A link within this machine, and its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), 60.0)
        theirs, _ = listener.accept()
    ours.settimeout(None)
    link = HostLink(0, ours, 60.0)  # on a busy machine a window may be full for long
    with theirs:
        theirs.settimeout(60.0)
        yield link, theirs
    link.close()


def test_a_link_that_sent_a_part_of_a_message_sends_no_other(joined_here: tuple[HostLink, socket.socket]) -> None:
    """The other end could not see where the next one begins; and each further one would block as long."""
    link, theirs = joined_here
    limit_calls(link._connection, socket.SO_SNDTIMEO, 0.05)
    with pytest.raises(OSError) as first:
        link.send(bytes(1 << 26))
    theirs.recv(1 << 24)  # there is room again
    with pytest.raises(OSError) as second:
        link.send(encode(StoredWord(Word.DONE, 1)))
    assert second.value is first.value


@pytest.mark.parametrize("amid", [True, False])
def test_a_signal_amid_a_message_breaks_a_link_and_before_one_does_not(
    joined_here: tuple[HostLink, socket.socket], amid: bool
) -> None:
    link, theirs = joined_here
    word = encode(StoredWord(Word.DONE, 1))

    def alarmed(*unused: object) -> None:
        if link.unacknowledged():  # it has begun to send
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            raise KeyboardInterrupt

    filled = 0
    if not amid:  # nothing fits any more
        link._connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                filled += link._connection.send(word)
        link._connection.setblocking(True)
    before = signal.signal(signal.SIGALRM, alarmed)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with pytest.raises(KeyboardInterrupt):
            link.send(bytes(1 << 26) if amid else word)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    while filled > 0:  # the kernel wakes a sender only once a good part of what it holds is gone
        filled -= len(theirs.recv(1 << 20))
    if amid:
        with pytest.raises(OSError, match="KeyboardInterrupt"):
            link.send(word)
    else:
        link.send(word)
