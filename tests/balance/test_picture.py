"""The picture of a plan: it is a picture, and its bars are the plan's microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest

from odc.balance import lb_mini, lb_split
from odc.balance import picture as module
from odc.balance.picture import draw_plan

pytest.importorskip("matplotlib", reason="needs the plot extra")


@pytest.mark.parametrize("ranks", [3, 300])
def test_every_microbatch_is_drawn_where_it_runs(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch):
    drawn = []
    boxes = module._boxes
    monkeypatch.setattr(module, "_boxes", lambda axes, some, *rest: (drawn.append(some), boxes(axes, some, *rest)))
    plan = lb_mini([7, 6, 5, 4, 3, 2, 1] * 50, ranks, 9, speeds=[1.0, *[0.5] * (ranks - 1)])
    draw_plan(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    idle, even, odd = drawn
    assert idle == [(0.0, rank, plan.longest) for rank in range(ranks)]
    expected = sorted((rank, cost) for rank, costs in enumerate(plan.costs) for cost in costs)
    assert sorted((rank, width) for _, rank, width in even + odd) == expected
    for rank, costs in enumerate(plan.costs):
        starts = sorted(left for left, row, _ in even + odd if row == rank)
        assert starts == pytest.approx([sum(costs[:m]) for m in range(len(costs))])


def test_pieces_are_drawn_in_the_colour_of_their_sample_before_the_microbatches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn = []
    boxes = module._boxes
    monkeypatch.setattr(module, "_boxes", lambda axes, *given: (drawn.append(given), boxes(axes, *given)))
    plan = lb_split([90, 80, 20, 10], 4, 100, floor=1)
    draw_plan(plan, tmp_path / "plan.png")
    _, *pieces, (even, *_), (odd, *_) = drawn
    assert len(pieces) == len(plan.splits) >= 2
    assert len({colour for _, colour, *_ in pieces}) == len(pieces)
    for (found, *_), split, start in zip(pieces, plan.splits, plan.split_starts, strict=True):
        assert found == [(start, rank, cost) for rank, cost in zip(split.ranks, split.costs, strict=True)]
    for rank, end in enumerate(plan.split_ends):
        assert all(left >= end for left, row, _ in even + odd if row == rank)
        both = zip(plan.splits, plan.split_starts, strict=True)
        assert end == max((at + max(split.costs) for split, at in both if rank in split.ranks), default=0.0)


def test_a_plan_without_cost_can_be_drawn(tmp_path: Path):
    draw_plan(lb_mini([1, 1], 2, 9, lambda length: 0.0), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 0
