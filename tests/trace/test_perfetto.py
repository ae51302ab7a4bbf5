from __future__ import annotations

import gzip
import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from odc.trace import (
    COMPUTE,
    FETCH,
    MICROBATCH,
    OPTIMIZER,
    PUSH,
    WAIT,
    WINDOW,
    Span,
    write_trace,
)

TRACE = {
    0: [
        Span(FETCH, "fetch", 8, 14, 4, 0, "layers.1", 1, 512),
        Span(WAIT, "main", 12, 15, 4, 0, "", 1),
        Span(FETCH, "main", 10, 20, 4, 0, "layers.0", -1, 64),
        Span(MICROBATCH, "main", 5, 30, 4, 0),
        Span(WINDOW, "main", 5, 40, 4),
        Span(OPTIMIZER, "main", 42, 50, 4),
    ],
    3: [Span(WINDOW, "main", 5, 40, 4)],
}


@st.composite
def any_span(draw):
    start = draw(st.integers(0, 2**45))
    return Span(
        draw(st.sampled_from([FETCH, PUSH, WAIT, OPTIMIZER, COMPUTE, WINDOW, MICROBATCH])),
        draw(st.sampled_from(["main", "fetch", "server"])),
        start,
        start + draw(st.integers(0, 2**45)),
        draw(st.integers(-1, 2**40)),
        draw(st.integers(-1, 9)),
        draw(st.text(max_size=5)),
        draw(st.integers(-2, 9)),
        draw(st.integers(0, 2**60)),
    )


@given(st.dictionaries(st.integers(0, 5000), st.lists(any_span(), max_size=6), max_size=4), st.booleans())
def test_round_trip(tmp_path_factory, trace, packed):
    path = tmp_path_factory.mktemp("trace") / ("trace.json.gz" if packed else "trace.json")
    write_trace(path, trace)
    loaded = read_trace(path)
    assert {rank: sorted(spans) for rank, spans in loaded.items()} == {r: sorted(s) for r, s in trace.items()}
    for spans in loaded.values():
        assert all(before.start_ns <= after.start_ns for before, after in pairwise(spans))
    write_trace(path, loaded)
    assert read_trace(path) == loaded


def read_trace(path):
    """The recorded spans by rank, in the order of the file."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    spans = {rank: [] for rank in trace["otherData"]["ranks"]}
    for event in trace["traceEvents"]:
        args = event["args"]
        if event["ph"] == "X" and not args.get("derived"):
            start = trace["otherData"]["origin_ns"] + round(event["ts"] * 1000)
            end = start + round(event["dur"] * 1000)
            where = args["epoch"], args["microbatch"], args["unit"], args["peer"], args["bytes"]
            spans[args["rank"]].append(Span(event["cat"], args["lane"], start, end, *where))
    return spans


def events(tmp_path, kind="X"):
    path = tmp_path / "trace.json"
    write_trace(path, TRACE)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_an_event_holds_what_viewers_need(tmp_path):
    (fetch,) = (event for event in events(tmp_path) if event["cat"] == FETCH and event["args"]["lane"] == "main")
    assert fetch == {
        "ph": "X",
        "name": "fetch layers.0",
        "cat": "fetch",
        "ts": 0.005,
        "dur": 0.01,
        "pid": 1,
        "tid": 1000,
        "args": {"rank": 0, "epoch": 4, "microbatch": 0, "unit": "layers.0", "peer": -1, "bytes": 64, "lane": "main"},
    }
    names = {event["name"] for event in events(tmp_path)}
    assert names >= {"minibatch 4", "microbatch 0", "wait for rank 1", "optimizer", "fetch layers.1"}


def test_processes_and_threads_are_named_and_their_numbers_unique(tmp_path):
    meta = events(tmp_path, "M")
    processes = {event["pid"]: event["args"]["name"] for event in meta if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in meta if event["name"] == "thread_name"}
    assert processes == {1: "rank 0", 4: "rank 3"}
    assert sorted(threads.values()) == ["fetch", "main", "main"]
    assert len({tid for _, tid in threads}) == 3
    assert len({event["args"]["sort_index"] for event in meta if event["pid"] == 1 and "sort" in event["name"]}) == 2
    assert 0 not in {number for pair in threads for number in pair}
    assert {(event["pid"], event["tid"]) for event in events(tmp_path)} <= set(threads)


@given(st.lists(any_span(), max_size=15))
def test_events_of_one_thread_nest_or_lie_apart(tmp_path_factory, spans):
    """Viewers draw nothing sensible otherwise."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(path, {0: spans})
    threads = {}
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            threads.setdefault(event["tid"], []).append((start, start + round(event["dur"] * 1000)))
    for mine in threads.values():
        for at, (start, end) in enumerate(mine):
            for other_start, other_end in mine[:at]:
                assert other_end <= start or (other_start <= start and end <= other_end)


def test_spans_that_overlap_get_a_second_row(tmp_path):
    path = tmp_path / "trace.json"
    spans = [Span(PUSH, "server", 0, 10), Span(PUSH, "server", 5, 15), Span(PUSH, "server", 10, 20)]
    write_trace(path, {2: spans})
    written = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert [event["tid"] for event in written if event["ph"] == "X"] == [3000, 3001, 3000]
    assert [e["args"]["name"] for e in written if e["name"] == "thread_name"] == ["server", "server (2)"]
    assert read_trace(path) == {2: spans}


def test_derived_compute_is_shown_and_marked(tmp_path):
    compute = [event for event in events(tmp_path) if event["cat"] == COMPUTE]
    assert [(event["ts"], event["dur"], event["args"]["derived"]) for event in compute] == [
        (0.0, 0.005, True),
        (0.015, 0.01, True),
    ]
    assert all(span.category != COMPUTE for span in read_trace(tmp_path / "trace.json")[0])


def test_an_outer_span_comes_before_the_inner_one_that_starts_with_it(tmp_path):
    first = [event["cat"] for event in events(tmp_path) if event["ts"] == 0 and event["args"]["rank"] == 0]
    assert first == [WINDOW, MICROBATCH, COMPUTE]


def test_ranks_are_named_and_shown_by_host(tmp_path):
    def processes(hosts):
        write_trace(tmp_path / "t.json", TRACE, hosts)
        file = json.loads((tmp_path / "t.json").read_text())
        named = [(event["name"], event["args"]) for event in file["traceEvents"] if event["name"].startswith("process")]
        names = [args["name"] for name, args in named if name == "process_name"]
        places = [args["sort_index"] for name, args in named if name == "process_sort_index"]
        return [name for _, name in sorted(zip(places, names, strict=True))], file["otherData"].get("hosts")

    assert processes({0: 1, 3: 0}) == (["host 0, rank 3", "host 1, rank 0"], [1, 0])
    assert processes({0: 0, 3: 0}) == (["rank 0", "rank 3"], None)
