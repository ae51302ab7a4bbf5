from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.members import BF16, F16, F32, F64, HeapGroup

from odc.protocol import Inbox, Outbox, Piece
from odc.protocol.regions import Ring
from odc.protocol.ring import RingWords
from odc.settings import Settings

SLOT = 128  # bytes
SLOTS = 3


@pytest.fixture(scope="module")
def group() -> Iterator[HeapGroup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ring, "fit", lambda *_: Ring(SLOTS, SLOT))
        with HeapGroup(
            [[("w", 4096, F32)], [("v", 4096, BF16)]], 3, settings=Settings(timeout_s=1.0), by_hand=True
        ) as group:
            group.attach()
            yield group


def put(box: Outbox, values: torch.Tensor, at_byte: int = 0) -> None:
    box.put(at_byte, values.data_ptr(), values.nbytes)


def pieces(inbox: Inbox, most: int = 1) -> list[Piece]:
    """The oldest blocks; none if there are none."""
    batch = inbox.peek(most)
    return batch[1] if batch else []


DTYPES = st.sampled_from([F32, BF16, F16, F64])
POST = st.tuples(st.integers(0, 1), st.integers(0, 4000), st.integers(1, SLOT // 8), DTYPES)
OPS = st.lists(st.one_of(POST, st.just("peek"), st.just("take")), max_size=40)


@given(OPS)
def test_a_ring_is_a_short_list(group: HeapGroup, ops: list[str | tuple[int, int, int, torch.dtype]]) -> None:
    """Whatever is posted and taken in whatever order: first in, first out, never more than there are slots."""
    box, inbox = Outbox(group.layouts[2], 0), Inbox(group.layouts[0], 2)
    model: list[tuple[int, int, torch.Tensor]] = []
    for number, op in enumerate(ops):
        assert box.credit() == SLOTS - len(model)
        assert inbox.waiting() == len(model)
        if isinstance(op, tuple) and box.credit():
            unit, first, numel, dtype = op
            values = torch.arange(number, number + numel).to(dtype)
            put(box, values)
            box.post(group.units[unit], first, numel, dtype)
            model.append((unit, first, values))
        elif op == "peek" or (op == "take" and model):
            block = inbox.peek()
            assert (block is None) == (not model)
            if block is not None:
                found, (piece,) = block
                assert (found.index, piece.first) == model[0][:2]
                assert piece.values.dtype == model[0][2].dtype
                assert torch.equal(piece.values, model[0][2])
        if op == "take" and model:
            inbox.take()
            model.pop(0)
    while model:
        inbox.take()
        model.pop(0)
    assert inbox.peek() is None and box.credit() == SLOTS


def test_a_slot_is_filled_in_parts_before_it_is_seen(group: HeapGroup) -> None:
    box, inbox = Outbox(group.layouts[1], 0), Inbox(group.layouts[0], 1)
    put(box, torch.tensor([1.0, 2.0]))
    put(box, torch.tensor([3.0]), at_byte=8)
    assert inbox.peek() is None and inbox.waiting() == 0, "nothing is seen before it is posted"
    box.post(group.units[0], 17, 3, F32)
    assert [(piece.first, piece.values.tolist()) for piece in pieces(inbox)] == [(17, [1.0, 2.0, 3.0])]
    assert box.credit() == SLOTS - 1, "a look gives no credit back"
    inbox.take()
    assert box.credit() == SLOTS


def test_what_was_announced_is_no_news(group: HeapGroup) -> None:
    """On the CPU a post announces by itself, so the owner need not be woken again afterwards."""
    box, inbox = Outbox(group.layouts[1], 0), Inbox(group.layouts[0], 1)
    put(box, torch.tensor([1.0]))
    box.post(group.units[0], 0, 1, F32)
    assert inbox.waiting() == 1
    assert not box.show()
    inbox.take()


def test_a_batch_is_what_waits_of_one_unit(group: HeapGroup) -> None:
    box, inbox = Outbox(group.layouts[1], 0), Inbox(group.layouts[0], 1)
    for unit, value in ((0, 1.0), (0, 2.0), (1, 3.0)):
        put(box, torch.tensor([value]))
        box.post(group.units[unit], 5, 1, F32)
    assert [piece.values.item() for piece in pieces(inbox, most=1)] == [1.0]
    assert [piece.values.item() for piece in pieces(inbox, most=3)] == [1.0, 2.0]
    inbox.take(2)
    assert box.credit() == 2
    assert [piece.values.item() for piece in pieces(inbox, most=3)] == [3.0]
    inbox.take()


def test_checks_see_what_either_end_of_a_ring_stores(group: HeapGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    for member in (1, 2):
        checked = replace(group.layouts[member].settings, check_protocol=True)
        monkeypatch.setattr(group.layouts[member], "settings", checked)
    pusher, reader = RingWords(group.layouts[2], 1, 2), RingWords(group.layouts[1], 1, 2)
    posted = pusher.posted()
    assert reader.added() == posted
    with pytest.raises(AssertionError, match=f"a ring of {SLOTS} slots"):
        pusher.post(posted + SLOTS + 1)
    with pytest.raises(AssertionError, match=f"a ring of {SLOTS} slots"):
        reader.give_back(posted + 1)
    assert pusher.posted() == reader.added() == posted


def test_the_slot_that_came_back_last_is_filled_next(group: HeapGroup) -> None:
    """An owner that keeps up finds every block in the same slot: in the cache."""
    box, inbox = Outbox(group.layouts[2], 1), Inbox(group.layouts[1], 2)
    places = set()
    for number in range(2 * SLOTS):
        put(box, torch.tensor([float(number)]))
        box.post(group.units[0], 0, 1, F32)
        (piece,) = pieces(inbox)
        assert piece.values.item() == number
        places.add(piece.values.data_ptr())
        inbox.take()
        assert box.credit() == SLOTS
    assert len(places) == 1
