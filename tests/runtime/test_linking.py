"""The thread that makes a root's links, or waits for them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from support.linked import Linked, two_hosts_unlinked
from support.waiting import until

from odc.errors import PeerLostError
from odc.protocol import Word
from odc.runtime import linking
from odc.runtime.linking import HostConnections


@pytest.mark.parametrize("host", [0, 1])
def test_a_rank_whose_links_do_not_come_notices_that_the_job_has_ended(
    host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of the first host, which dials none and waits for nothing else than to be dialled."""
    aborted, over, asked = list[tuple[str, int]](), threading.Event(), list[str]()

    def abort(layout: object, reason: str, culprit: int) -> None:
        aborted.append((reason, culprit))
        over.set()

    def refuse_failed(doing: str) -> None:
        asked.append(doing)
        if len(asked) == 3:
            raise PeerLostError("rank 5 died", culprit=5)

    def dial(*unused: object) -> None:
        raise PeerLostError("rank 0 hangs up", culprit=0)

    monkeypatch.setattr(linking, "abort", abort)
    grid = SimpleNamespace(partners=[0, 2] if host else [1, 2], host=lambda member: member, here=host, rank=host)
    grid.ranks = [0, 1, 2]
    missed = list[int]()
    network = SimpleNamespace(expect=lambda *unused: None, dial=dial)
    links = SimpleNamespace(up=lambda partner: False, missed=lambda partner, why: missed.append(partner))
    rendezvous = SimpleNamespace(refuse_failed=refuse_failed, agreed=lambda partner: None, check=None)
    made: Any = HostConnections
    made("root", SimpleNamespace(grid=grid), network, links, None).connect(rendezvous)
    assert over.wait(60.0)
    assert aborted == [("rank 5 died", 5)] and len(asked) == 3 and missed == ([0] if host else [])


def test_a_rank_that_cannot_be_dialled_is_not_reported_as_one_that_has_left() -> None:
    """Its reason is an error of this host, by which the ranks beside this one see that rank too."""
    why = "rank 16, connecting to rank 10 at 10.0.0.1:4: [Errno 113] No route to host"

    def dial(*unused: object) -> None:
        raise PeerLostError(why, culprit=10)

    linked = Linked(two_hosts_unlinked())
    network: Any = SimpleNamespace(expect=lambda *unused: None, dial=dial)
    rendezvous: Any = SimpleNamespace(agreed=lambda partner: None, check=None)
    made = HostConnections("root", linked.group.layouts[2], network, linked.links[2], lambda link: None)
    made.connect(rendezvous)
    until(lambda: linked.seen(2, 0, Word.LEFT))
    assert not linked.aborts[2]
    for member in (2, 3):
        waiter = linked.group.members[member].protocol.waiter
        with pytest.raises(PeerLostError) as caught:
            waiter.until(lambda: False, 0, "rank 10 to publish epoch 1")
        me = linked.group.layouts[member].grid.rank
        assert str(caught.value) == (
            f"rank {me} (epoch 0), waiting for rank 10 to publish epoch 1: rank 10 cannot be reached: {why}"
        )
        assert caught.value.culprit == 10
    linked.close()


def test_any_error_of_the_thread_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes where an error of a thread goes: else the others would wait for links that never come."""
    aborted, uncaught, over = list[tuple[str, int]](), list[object](), threading.Event()

    def excepthook(args: threading.ExceptHookArgs) -> None:
        uncaught.append(args.exc_type)
        over.set()

    def dial(*unused: object) -> None:
        raise ValueError("no such purpose")

    monkeypatch.setattr(linking, "abort", lambda layout, reason, culprit: aborted.append((reason, culprit)))
    monkeypatch.setattr(threading, "excepthook", excepthook)
    grid = SimpleNamespace(partners=[0], host=lambda member: member, here=1, rank=1, ranks=[0, 1])
    network = SimpleNamespace(expect=lambda *unused: None, dial=dial)
    rendezvous = SimpleNamespace(agreed=lambda partner: None, check=None)
    made: Any = HostConnections
    made("root", SimpleNamespace(grid=grid), network, None, None).connect(rendezvous)
    assert over.wait(60.0)
    assert aborted == [("no such purpose", 1)] and uncaught == [ValueError]
