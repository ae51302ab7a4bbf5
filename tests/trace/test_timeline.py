from __future__ import annotations

import sys
from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.image import imread

from odc.errors import OdcError, TraceError
from odc.trace import (
    COMPUTE,
    FETCH,
    GIVEN_UP,
    MICROBATCH,
    OPTIMIZER,
    RECOVERY,
    WAIT,
    WINDOW,
    Span,
    draw,
    piece_of,
)
from odc.trace.timeline import COLOURS, PIECE_COLOURS, RECOVERY_COLOURS

MS = 1_000_000


def trace(ranks, *, waits, epochs=3):
    """Every rank: two microbatches of 40 ms, of which the second half of each is spent waiting if `waits`."""
    spans = {}
    for rank in range(ranks):
        mine = spans[rank] = []
        for epoch in range(epochs):
            at = epoch * 100 * MS
            for microbatch in range(2):
                start = at + microbatch * 40 * MS
                if waits:
                    mine.append(Span(WAIT, "main", start + 20 * MS, start + 40 * MS, epoch, microbatch))
                mine.append(Span(MICROBATCH, "main", start, start + 40 * MS, epoch, microbatch))
            mine.append(Span(FETCH, "fetch", at, at + 10 * MS, epoch))
            mine.append(Span(WINDOW, "main", at, at + 85 * MS, epoch))
            mine.append(Span(OPTIMIZER, "main", at + 85 * MS, at + 95 * MS, epoch))
    return spans


def share(path, category):
    """Share of the picture's pixels in the very colour of a category, or in a colour."""
    pixels = np.round(imread(path)[..., :3] * 255).astype(int)
    colour = [int(COLOURS.get(category, category)[at : at + 2], 16) for at in (1, 3, 5)]
    return float((pixels == colour).all(axis=-1).mean())


def test_recoveries_can_be_seen(tmp_path):
    spans = trace(2, waits=False)
    draw(tmp_path / "without.png", [("without", spans)])
    for rank, mine in spans.items():
        mine[:] = [span for span in mine if span.epoch < 2] + [
            span._replace(start_ns=span.start_ns + 60 * MS, end_ns=span.end_ns + 60 * MS)
            for span in mine
            if span.epoch == 2
        ]
        mine.append(Span(GIVEN_UP, RECOVERY, 200 * MS, 220 * MS, 2, unit="minibatch 2"))
        mine.append(Span(RECOVERY, RECOVERY, 220 * MS, 250 * MS, 1, unit="generation 1", peer=1 - rank))
    draw(tmp_path / "with.png", [("with", spans)])
    for category in (GIVEN_UP, RECOVERY):
        assert share(tmp_path / "without.png", RECOVERY_COLOURS[category]) == 0
        assert share(tmp_path / "with.png", RECOVERY_COLOURS[category]) > 0.01


def test_waits_can_be_seen(tmp_path):
    draw(tmp_path / "with.png", [("with", trace(4, waits=True))])
    draw(tmp_path / "without.png", [("without", trace(4, waits=False))])
    assert share(tmp_path / "with.png", WAIT) > 0.1
    assert share(tmp_path / "without.png", WAIT) < 0.005  # its patch in the legend
    assert share(tmp_path / "without.png", COMPUTE) > 1.8 * share(tmp_path / "with.png", COMPUTE)


def test_passes_have_colours_of_their_own(tmp_path):
    ink = {"first": "#123456", "second": "#65a321"}
    draw(tmp_path / "passes.png", [("two", trace(2, waits=False))], passes=list(ink.items()))
    pixels = np.round(imread(tmp_path / "passes.png")[..., :3] * 255).astype(int)
    for colour in ink.values():
        mine = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        assert float((pixels == mine).all(axis=-1).mean()) > 0.05
    assert share(tmp_path / "passes.png", COMPUTE) == 0


def test_pieces_have_one_colour_a_split_sample(tmp_path):
    spans = {
        rank: [
            Span(MICROBATCH, "main", 0, 30 * MS, 1, 0, piece_of(4)),
            Span(WAIT, "main", 5 * MS, 10 * MS, 1, 0, "kv0", 1 - rank),
            Span(MICROBATCH, "main", 30 * MS, 60 * MS, 1, 1, piece_of(7)),
            Span(MICROBATCH, "main", 60 * MS, 90 * MS, 1, 2),
            Span(WINDOW, "main", 0, 90 * MS, 1),
        ]
        for rank in range(2)
    }
    draw(tmp_path / "split.png", [("split", spans)])
    draw(tmp_path / "whole.png", [("whole", trace(2, waits=False))])
    first, second, third = (share(tmp_path / "split.png", colour) for colour in PIECE_COLOURS[:3])
    assert second == pytest.approx(first * 30 / 25, rel=0.1) and third < 0.1 * first, "the third is in the legend alone"
    assert share(tmp_path / "split.png", COMPUTE) == pytest.approx(second, rel=0.1)
    assert share(tmp_path / "whole.png", PIECE_COLOURS[0]) == 0


@pytest.mark.parametrize("ranks", [1, 2, 32])
def test_every_number_of_ranks_fits(tmp_path, ranks):
    path = tmp_path / "t.png"
    draw(str(path), [("one", trace(ranks, waits=True)), ("two", trace(ranks, waits=False))])
    height, width = imread(path).shape[:2]
    assert width == 1950
    assert 300 < height < 3000


def test_rows_stand_by_host_with_room_between_hosts(tmp_path):
    spans = trace(4, waits=False)
    late = [span._replace(start_ns=span.start_ns + 30 * MS, end_ns=span.end_ns + 30 * MS) for span in spans[1]]
    draw(tmp_path / "one.png", [("one", spans | {1: late})], epochs=[0], hosts=dict.fromkeys(range(4), 0))
    draw(tmp_path / "two.png", [("two", spans | {1: late})], epochs=[0], hosts={0: 0, 1: 1, 2: 0, 3: 1})
    one, two = (bands(tmp_path / name) for name in ("one.png", "two.png"))
    assert [late for _, late in one] == [False, True, False, False], "the second row is rank 1's"
    assert [late for _, late in two] == [False, False, True, False], "the third row is rank 1's"
    gaps = [after - before for (before, _), (after, _) in pairwise(two)]
    assert gaps[1] > 1.2 * gaps[0] and gaps[2] == pytest.approx(gaps[0], abs=2)


def bands(path):
    """Of each row that computes, from the top: its first line of pixels, and whether it begins later than others."""
    pixels = np.round(imread(path)[200:, :, :3] * 255).astype(int)
    colour = [int(COLOURS[COMPUTE][at : at + 2], 16) for at in (1, 3, 5)]
    found = (pixels == colour).all(axis=-1)
    first = np.where(found.any(axis=1), found.argmax(axis=1), 10**6)
    starts = [at for at in range(1, len(first)) if first[at] < 10**6 and first[at - 1] == 10**6]
    return [(at, bool(first[at + 5] > first[first < 10**6].min() + 50)) for at in starts]


def test_panels_share_one_time_axis(tmp_path):
    """Beside a panel three times as long, the same trace takes a third of the width."""
    draw(tmp_path / "same.png", [("a", trace(2, waits=True)), ("b", trace(2, waits=True))], epochs=[0])
    slow = {
        r: [s._replace(start_ns=3 * s.start_ns, end_ns=3 * s.end_ns) for s in spans]
        for r, spans in trace(2, waits=False).items()
    }
    draw(tmp_path / "slow.png", [("slow", slow), ("b", trace(2, waits=True))], epochs=[0])
    ratio = share(tmp_path / "slow.png", OPTIMIZER) / share(tmp_path / "same.png", OPTIMIZER)
    waits = share(tmp_path / "slow.png", WAIT) / (share(tmp_path / "same.png", WAIT) / 2)
    assert 0.25 < waits < 0.45
    assert ratio > 0.5  # the slow panel's optimizer is as wide as before


def test_epochs_are_chosen(tmp_path):
    spans = trace(2, waits=True)
    spans[0].append(Span(FETCH, "main", 100 * MS, 140 * MS, 1))
    for epoch in (0, 1):
        draw(tmp_path / f"{epoch}.png", [("a", spans)], epochs=[epoch, 77])
    assert share(tmp_path / "1.png", FETCH) > 3 * share(tmp_path / "0.png", FETCH)


def test_nothing_to_draw(tmp_path):
    with pytest.raises(TraceError, match="at least one panel"):
        draw(tmp_path / "t.png", [])
    with pytest.raises(TraceError, match="arm: all ranks recorded none of the requested minibatches"):
        draw(tmp_path / "t.png", [("arm", trace(2, waits=True))], epochs=[9])
    with pytest.raises(TraceError, match="nothing is left"):
        draw(tmp_path / "t.png", [("arm", {0: []})])
    assert not (tmp_path / "t.png").exists()


def test_nothing_global_changes(tmp_path):
    before, modules = dict(mpl.rcParams), set(sys.modules)
    draw(tmp_path / "t.png", [("a", trace(2, waits=True))])
    assert dict(mpl.rcParams) == before
    assert "matplotlib.pyplot" not in set(sys.modules) - modules


def test_a_missing_matplotlib_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OdcError, match=r"odc-fsdp\[plot\]"):
        draw(tmp_path / "t.png", [("a", trace(2, waits=True))])
