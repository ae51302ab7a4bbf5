from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.memory import Layout, Request
from odc.memory.layout import describe, difference

REQUESTS = st.lists(
    st.builds(Request, st.text("abcdef/.0123456789 -é", min_size=1, max_size=12), st.integers(1, 1 << 20)),
    max_size=20,
    unique_by=lambda request: request.name,
)


@given(REQUESTS)
def test_regions_are_aligned_ordered_and_apart(requests: list[Request]) -> None:
    layout = Layout.build(requests, "x")
    end = 0
    for request in requests:
        offset = layout.offset(request.name)
        step = mmap.PAGESIZE if request.nbytes >= 64 << 10 else 64
        assert offset % step == 0
        assert end <= offset < end + step, "no more padding than alignment asks for"
        assert layout.size(request.name) == request.nbytes
        end = offset + request.nbytes
    assert layout.nbytes % mmap.PAGESIZE == 0
    assert end <= layout.nbytes < end + 2 * mmap.PAGESIZE


@given(REQUESTS, REQUESTS, st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"]))
def test_digests_of_different_layouts_differ(one: list[Request], two: list[Request], mark: str, other: str) -> None:
    same = one == two and mark == other
    assert (Layout.build(one, mark).digest == Layout.build(two, other).digest) == same
    assert Layout.build(list(one), mark) == Layout.build(one, mark)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([Request("a", 1), Request("b", 2)], [Request("b", 2), Request("a", 1)]),
        ([Request("a", 64)], [Request("a", 63)]),  # the same offsets and the same total
        ([Request("a", 11)], [Request("1a", 1)]),
        ([], [Request("fingerprint", 1)]),
    ],
)
def test_near_misses(one: list[Request], two: list[Request]) -> None:
    assert Layout.build(one).digest != Layout.build(two).digest


@given(REQUESTS, REQUESTS)
def test_a_difference_names_the_first_region_that_differs(one: list[Request], two: list[Request]) -> None:
    text = difference(describe(one, "f"), describe(two, "f"))
    if one == two:
        assert text == "nothing"
        return
    first = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    assert text.startswith(f"region {first}: ")
    for requests in (one, two):
        if first < len(requests):
            assert f"{requests[first].name!r} of {requests[first].nbytes} bytes" in text
        else:
            assert "the end" in text


@pytest.mark.parametrize(
    "request_", [Request("", 1), Request("a\tb", 1), Request("a\n", 1), Request("a", 0), Request("a", -1)]
)
def test_bad_requests_are_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="region"):
        Layout.build([request_])


def test_duplicates_are_refused() -> None:
    with pytest.raises(ValueError, match="region 'a' was allocated twice"):
        Layout.build([Request("a", 1), Request("b", 1), Request("a", 1)])


def test_an_unknown_name_lists_what_there_is() -> None:
    layout = Layout.build([Request("board", 8), Request("sent", 8)])
    for use in (layout.offset, layout.size):
        with pytest.raises(KeyError, match="no region 'bord' in this heap; it has board, sent"):
            use("bord")


def test_an_empty_layout_has_a_page() -> None:
    assert Layout.build([]).nbytes == mmap.PAGESIZE
