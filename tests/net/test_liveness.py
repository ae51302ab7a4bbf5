"""The table of lost ranks."""

from __future__ import annotations

from typing import cast

import pytest
from support.listeners import ByHand

from odc.errors import PeerLostError
from odc.net.liveness import Liveness, Loss
from odc.net.reactor import Reactor


def test_every_report_reaches_those_that_follow_and_the_first_of_a_rank_stays() -> None:
    liveness, early, late = Liveness(cast(Reactor, ByHand()), 0), list[Loss](), list[Loss]()
    first, second = Loss(3, 3, "rank 3 died", ""), Loss(3, 1, "rank 3 speaks nonsense")
    liveness.follow("early", early.append)
    for loss in (first, second):
        liveness.report(loss)
    assert early == [first, second]
    assert liveness.losses() == [first] and liveness.is_first(first) and not liveness.is_first(second)
    liveness.follow("late", late.append)
    liveness.unfollow("early")
    liveness.report(other := Loss(2, 2, "rank 2 died", ""))
    assert (early, late) == ([first, second], [first, other])


def test_what_is_not_certain_is_no_news_for_a_root_that_is_built_later() -> None:
    liveness, seen, later = Liveness(cast(Reactor, ByHand()), 0), list[Loss](), list[Loss]()
    liveness.follow("root", seen.append)
    liveness.report(loss := Loss(3, 3, "rank 3 died", ": its link has ended", certain=False))
    liveness.follow("later", later.append)
    assert (seen, later) == ([loss], [])
    assert not liveness.is_first(loss), "it does not go around the ring"


def test_the_first_certain_loss_ends_what_has_no_root_yet() -> None:
    liveness = Liveness(cast(Reactor, ByHand()), 0)
    liveness.report(Loss(3, 3, "rank 3 died", ": its link has ended", certain=False))
    liveness.report(Loss(0, 0, "ValueError: of a thread of this rank"))
    liveness.refuse("rank 0, building a root")
    liveness.report(Loss(2, 1, "rank 2 died", ": its process has ended"))
    liveness.report(Loss(4, 4, "rank 4 died"))
    expected = "^rank 0, building a root: the job was aborted by rank 1: rank 2 died: its process has ended$"
    with pytest.raises(PeerLostError, match=expected) as lost:
        liveness.refuse("rank 0, building a root")
    assert lost.value.culprit == 1


def test_the_epoch_stands_between_a_reason_and_its_detail() -> None:
    assert Loss(3, 3, "rank 3 died", ": its link has ended").text(" in epoch 5") == (
        "rank 3 died in epoch 5: its link has ended"
    )
    assert Loss(3, 3, "rank 3 died", "").text(" in epoch 5") == "rank 3 died in epoch 5"
    assert Loss(3, 3, "ValueError: no page").text(" in epoch 5") == "ValueError: no page"
