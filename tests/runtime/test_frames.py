"""Twin of odc/net/frames.py."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.net.frames import Frame, FrameKind, FrameReader, MalformedFrameError

LIMITS = {
    FrameKind.WORD: 0,
    FrameKind.REASON: 100,
    FrameKind.ABANDONMENT: 100,
    FrameKind.COUNTS: 64,
    FrameKind.ENTRIES: 48,
    FrameKind.TAKEN: 48,
    FrameKind.SUMMED: 32,
}
WORDS = 24
frames = st.builds(
    lambda kind, index, value, body: Frame(kind, index, value, body[: LIMITS[kind]]),
    st.sampled_from(FrameKind),
    st.integers(0, WORDS - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=100),
)


@given(st.lists(frames, max_size=6), st.lists(st.integers(1, 40), min_size=1))
def test_frames_arrive_as_they_were_sent_however_the_stream_is_cut(sent: list[Frame], cuts: list[int]) -> None:
    data, reader, found = b"".join(frame.encode() for frame in sent), FrameReader(LIMITS, WORDS), list[Frame]()
    at = 0
    while at < len(data):
        step = cuts[len(found) % len(cuts)]
        found += reader.feed(data[at : at + step])
        at += step
    assert found == sent


@pytest.mark.parametrize(
    "head",
    [(0, 0, 0), (9, 0, 0), (FrameKind.WORD, WORDS, 0), (FrameKind.WORD, 0, 1), (FrameKind.COUNTS, 0, 2**32 - 1)],
)
def test_what_no_rank_sends_is_refused_before_its_body_is_waited_for(head: tuple[int, int, int]) -> None:
    with pytest.raises(MalformedFrameError):
        list(FrameReader(LIMITS, WORDS).feed(struct.pack("!BxHIq", *head, 0)))


@given(st.binary(min_size=16, max_size=4096))
def test_noise_is_refused_or_bounded(noise: bytes) -> None:
    reader = FrameReader(LIMITS, WORDS)
    try:
        for at in range(0, len(noise), 64):
            list(reader.feed(noise[at : at + 64]))
            assert len(reader._buffer) < 16 + max(LIMITS.values())
    except MalformedFrameError:
        pass
