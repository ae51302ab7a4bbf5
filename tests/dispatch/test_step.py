"""A step's plan against the plain reference: every example's sequence, assembled by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from _toy import ENCODERS, POLICIES, phases
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.dispatch import TEXT, Nodes, Records, StepPlan, plan_step
from odc.errors import PlanError

Example = list[tuple[str, int, int]]


@st.composite
def steps(draw: st.DrawFn) -> list[list[Example]]:
    """Examples of a few instances as (phase, length, tokens) parts; each has at least one token."""
    length = st.integers(1, 9)

    def part(name: str) -> st.SearchStrategy[tuple[str, int, int]]:
        if name == TEXT:
            return length.map(lambda n: (TEXT, n, n))
        return st.tuples(st.just(name), length, st.integers(0, 5))

    parts = st.lists(st.sampled_from([TEXT, *ENCODERS]).flatmap(part), max_size=4)
    example = parts.map(lambda one: [*one, (TEXT, 1, 1)])
    return draw(st.lists(st.lists(example, max_size=4), min_size=1, max_size=5))


def split(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    ends = np.cumsum(counts)
    return [list(values[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def assembled(plan: StepPlan, step: list[list[Example]]) -> list[list[tuple[Any, ...]]]:
    """What every instance's LLM sees, moved as the plan says: (instance, example, part, token) each."""
    named = [
        [[(i, e, p, name, tokens) for p, (name, _, tokens) in enumerate(example)] for e, example in enumerate(examples)]
        for i, examples in enumerate(step)
    ]
    arrived = []
    texts = [[[part for part in example if part[3] == TEXT] for example in examples] for examples in named]
    arrived.append([[p for example in batch for p in example] for batch in plan.llm.apply(texts)])
    for name, encoder in plan.encoders.items():
        raw = [[part for example in examples for part in example if part[3] == name] for examples in named]
        arrived.append(encoder.outbound.apply(encoder.inbound.apply(raw)))
        for i, batch in enumerate(encoder.inbound.apply(raw)):
            assert encoder.tokens_at(i).tolist() == [part[4] for part in batch]
            lengths = {
                (a, e, p): step[a][e][p][1]
                for a, es in enumerate(step)
                for e, x in enumerate(es)
                for p in range(len(x))
            }
            assert encoder.lengths_at(i).tolist() == [lengths[part[:3]] for part in batch]
    found = []
    for instance in range(len(step)):
        rows = [(*part[:3], t) for phase in arrived for part in phase[instance] for t in range(part[4])]
        found.append([rows[at] for at in plan.interleaving(instance).tolist()])
    return found


@settings(max_examples=40)
@given(steps(), st.sampled_from(sorted(POLICIES)), st.sampled_from([None, Nodes(1), Nodes(2, tolerance=0.5)]))
def test_every_sequence_arrives_whole_and_in_order(step: list[list[Example]], name: str, nodes: Nodes | None) -> None:
    records = [Records.of(examples, ENCODERS) for examples in step]
    plan = plan_step(records, *phases(name), nodes=nodes)
    found = assembled(plan, step)
    seen = set()
    for instance, sequence in enumerate(found):
        begin = 0
        for length in plan.lengths_at(instance).tolist():
            one = sequence[begin : begin + length]
            begin += length
            source, e = one[0][:2]
            assert one == [(source, e, p, t) for p, part in enumerate(step[source][e]) for t in range(part[2])]
            seen.add((source, e))
        assert begin == len(sequence)
    assert seen == {(i, e) for i, examples in enumerate(step) for e in range(len(examples))}


def test_the_digest_tells_plans_apart() -> None:
    step = [[[(TEXT, 5, 5), ("vision", 8, 4)]], [[(TEXT, 3, 3)], [(TEXT, 1, 1), ("audio", 2, 1)]]]
    records = [Records.of(examples, ENCODERS) for examples in step]
    plan = plan_step(records, *phases("full"))
    assert plan.digest == plan_step(records, *phases("full")).digest
    assert plan.digest != plan_step(records[::-1], *phases("full")).digest


def test_records_travel_as_integers() -> None:
    records = Records.of([[(TEXT, 5), ("audio", 9, 3)], [(TEXT, 2)]], ENCODERS)
    back = Records.from_array(records.to_array())
    for name in ("example", "phase", "length", "tokens"):
        assert np.array_equal(getattr(back, name), getattr(records, name)), name
    assert back.examples == 2
    assert back.sequence_lengths().tolist() == [8, 2]
    empty = Records.from_array(Records.of([], ENCODERS).to_array())
    assert empty.examples == 0 and empty.check(0, [None, None, None]).sequence_lengths().tolist() == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"example": [1, 0, 0]}, "must rise from 0 to 1"),
        ({"example": [0, 0, 2]}, "must rise from 0 to 1"),
        ({"phase": [0, 3, 0]}, "a phase of its records is none of 0 to 2"),
        ({"tokens": [5, 2, 1.5]}, "example 1, has 1.5 as its number of tokens"),
        ({"tokens": [4, 2, 2]}, "the length of text is its number of tokens"),
        ({"length": [5, 9]}, "the columns of its records differ in length"),
        ({"length": ["5", "9", "2"]}, "records hold numbers"),
    ],
)
def test_records_that_are_none_are_refused(change: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {"example": [0, 0, 1], "phase": [0, 1, 0], "length": [5, 9, 2], "tokens": [5, 2, 2]}
    Records(2, **good).check(7, [None, None, None])
    with pytest.raises(PlanError, match=f"instance 7: .*{says}"):
        Records(2, **(good | change)).check(7, [None, None, None])


def test_an_unknown_modality_is_named() -> None:
    with pytest.raises(PlanError, match="example 1 has a part 'smell'; the phases are text, vision, audio"):
        Records.of([[], [("smell", 1)]], ENCODERS)
