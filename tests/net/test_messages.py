"""Messages between hosts: they arrive as they were sent, and what no rank sends is refused before it is buffered."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.net.messages import _CODES, MalformedMessageError, Message, MessageReader, encode

LONGEST = 12  # of a text in bytes, or of a tuple
CLASSES = [*_CODES]
LIMITS: dict[type[Message], int] = dict.fromkeys(CLASSES, LONGEST)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
OF_TYPE = {
    "int": INTEGERS,
    "str": st.text(max_size=LONGEST // 4),
    "tuple[int, ...]": st.lists(INTEGERS, max_size=LONGEST).map(tuple),
}
messages = st.sampled_from(CLASSES).flatmap(
    lambda of: st.builds(of, *(OF_TYPE[str(field.type)] for field in of.__dataclass_fields__.values()))
)


@given(st.lists(messages, max_size=6), st.lists(st.integers(1, 40), min_size=1))
def test_messages_arrive_as_they_were_sent_however_the_stream_is_cut(sent: list[Message], cuts: list[int]) -> None:
    data, reader, found = b"".join(map(encode, sent)), MessageReader(LIMITS), list[Message]()
    at = 0
    while at < len(data):
        step = cuts[len(found) % len(cuts)]
        found += reader.feed(data[at : at + step])
        at += step
    assert found == sent


@pytest.mark.parametrize(
    "head", [(0, 0), (len(CLASSES) + 1, 0), (1, 17), (1, 15), (2, LONGEST + 1), (4, 9), (4, 2**31)]
)
def test_what_no_rank_sends_is_refused_before_its_body_is_waited_for(head: tuple[int, int]) -> None:
    with pytest.raises(MalformedMessageError):
        list(MessageReader(LIMITS).feed(struct.pack("!BI", *head)))


def test_a_class_that_is_not_expected_is_refused() -> None:
    with pytest.raises(MalformedMessageError, match="of kind 1"):
        list(MessageReader({CLASSES[1]: LONGEST}).feed(struct.pack("!BI", 1, 16)))


@given(st.binary(min_size=16, max_size=4096))
def test_noise_is_refused_or_bounded(noise: bytes) -> None:
    reader = MessageReader(LIMITS)
    try:
        for at in range(0, len(noise), 64):
            list(reader.feed(noise[at : at + 64]))
            assert len(reader._buffer) < 5 + 2 * 8 + 8 * LONGEST
    except MalformedMessageError:
        pass
