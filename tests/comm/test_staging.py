from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from _members import BF16, F16, F32, F64, Crew
from hypothesis import given
from hypothesis import strategies as st

from odc.comm import Inbox, Outbox
from odc.comm.space import Ring
from odc.settings import Settings

SLOT = 128  # bytes
SLOTS = 3


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ring, "fit", lambda units, block: Ring(SLOTS, SLOT))
        with Crew([[("w", 4096, F32)], [("v", 4096, BF16)]], 3, settings=Settings(timeout_s=1.0), by_hand=True) as crew:
            crew.attach()
            yield crew


def put(box: Outbox, values: torch.Tensor, at_byte: int = 0) -> None:
    box.put(at_byte, values.data_ptr(), values.nbytes)


DTYPES = st.sampled_from([F32, BF16, F16, F64])
POST = st.tuples(st.integers(0, 1), st.integers(0, 4000), st.integers(1, SLOT // 8), DTYPES)
OPS = st.lists(st.one_of(POST, st.just("peek"), st.just("take")), max_size=40)


@given(OPS)
def test_a_ring_is_a_short_list(crew: Crew, ops: list[str | tuple[int, int, int, torch.dtype]]) -> None:
    """Whatever is posted and taken in whatever order: first in, first out, never more than there are slots."""
    box, inbox = Outbox(crew.spaces[2], 0), Inbox(crew.spaces[0], 2)
    model: list[tuple[int, int, torch.Tensor]] = []
    for number, op in enumerate(ops):
        assert box.credit() == SLOTS - len(model)
        assert inbox.waiting() == len(model)
        if isinstance(op, tuple) and box.credit():
            unit, first, numel, dtype = op
            values = torch.arange(number, number + numel).to(dtype)
            put(box, values)
            box.post(crew.units[unit], first, numel, dtype)
            model.append((unit, first, values))
        elif op == "peek" or (op == "take" and model):
            block = inbox.peek()
            assert (block is None) == (not model)
            if block is not None:
                assert (block[0].index, block[1]) == model[0][:2]
                assert block[2].dtype == model[0][2].dtype
                assert torch.equal(block[2], model[0][2])
        if op == "take" and model:
            inbox.take()
            model.pop(0)
    while model:
        inbox.take()
        model.pop(0)
    assert inbox.peek() is None and box.credit() == SLOTS


def test_a_slot_is_filled_in_parts_before_it_is_seen(crew: Crew) -> None:
    box, inbox = Outbox(crew.spaces[1], 0), Inbox(crew.spaces[0], 1)
    put(box, torch.tensor([1.0, 2.0]))
    put(box, torch.tensor([3.0]), at_byte=8)
    assert inbox.peek() is None and inbox.waiting() == 0, "nothing is seen before it is posted"
    box.post(crew.units[0], 17, 3, F32)
    block = inbox.peek()
    assert block is not None
    assert (block[1], block[2].tolist()) == (17, [1.0, 2.0, 3.0])
    assert box.credit() == SLOTS - 1, "a look gives no credit back"
    inbox.take()
    assert box.credit() == SLOTS


def test_a_full_ring_keeps_what_it_holds(crew: Crew) -> None:
    box, inbox = Outbox(crew.spaces[1], 0), Inbox(crew.spaces[0], 1)
    for number in range(SLOTS):
        put(box, torch.full((SLOT // 4,), float(number)))
        box.post(crew.units[0], number, SLOT // 4, F32)
    assert box.credit() == 0
    for number in range(SLOTS):
        block = inbox.peek()
        assert block is not None and block[1] == number
        assert torch.equal(block[2], torch.full((SLOT // 4,), float(number)))
        inbox.take()


def test_rings_of_different_pairs_are_apart(crew: Crew) -> None:
    boxes = {
        (source, owner): Outbox(crew.spaces[source], owner)
        for source in range(3)
        for owner in range(3)
        if source != owner
    }
    inboxes = {(source, owner): Inbox(crew.spaces[owner], source) for source, owner in boxes}
    for (source, owner), box in boxes.items():
        for slot in range(SLOTS):
            put(box, torch.full((SLOT // 4,), 100.0 * source + 10.0 * owner + slot))
            box.post(crew.units[0], 0, SLOT // 4, F32)
    for (source, owner), inbox in inboxes.items():
        for slot in range(SLOTS):
            block = inbox.peek()
            assert block is not None
            assert set(block[2].tolist()) == {100.0 * source + 10.0 * owner + slot}
            inbox.take()
        assert inbox.peek() is None


def test_both_ends_go_on_where_the_counters_stand(crew: Crew) -> None:
    box, inbox = Outbox(crew.spaces[1], 2), Inbox(crew.spaces[2], 1)
    for number in range(SLOTS + 1):
        put(box, torch.tensor([float(number)]))
        box.post(crew.units[0], number, 1, F32)
        if number < SLOTS - 1:
            inbox.take()
        elif number == SLOTS - 1:
            box = Outbox(crew.spaces[1], 2)
            assert box.credit() == SLOTS - 1
    inbox = Inbox(crew.spaces[2], 1)
    assert inbox.waiting() == 2
    for number in (SLOTS - 1, SLOTS):
        block = inbox.peek()
        assert block is not None and block[2].tolist() == [float(number)]
        inbox.take()
