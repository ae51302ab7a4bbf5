"""A job in one process: its fetches and pushes move what those of ranks do."""

from __future__ import annotations

import torch

from odc.bench.alone import Members, UnitCalls, lanes_of, sliced
from odc.settings import Settings

CPU = torch.device("cpu")


def test_members_in_one_process_push_to_each_other() -> None:
    members = Members(CPU, lambda _: lanes_of(CPU), Settings(), 3, [sliced(4, 8)])
    members.publish()
    calls = UnitCalls(members)
    for gradient in calls._sent:
        gradient.values.fill_(2.0)
    calls.push()
    members.drain()
    assert [set(one.mine.accumulator(members.unit).tolist()) for one in members.layouts] == [{2.0}] * 3
    for one in calls._into:
        one.fill_(1.0)
    calls.fetch()
    assert all(not one.any() for one in calls._into), "zeros were published"
    members.close()


def test_more_pushes_than_slots_are_drained_in_between() -> None:
    members = Members(CPU, lambda _: lanes_of(CPU), Settings(), 2, [sliced(2, 8)])
    members.publish()
    calls = UnitCalls(members)
    for gradient in calls._sent:
        gradient.values.fill_(1.0)
    for _ in range(10):
        calls.push()
        members.drain()
    assert [set(one.mine.accumulator(members.unit).tolist()) for one in members.layouts] == [{10.0}] * 2
    members.close()
