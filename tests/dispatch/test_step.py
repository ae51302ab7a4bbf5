"""A step's plan against the plain reference: every example's sequence, assembled by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to
from support.toy import ENCODERS, POLICIES, phases

from odc.dispatch import TEXT, BalancePolicy, Nodes, Phase, Rearrangement, Records, StepPlan, plan_step
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
    """What every instance's LLM sees, moved as planned: (instance, example, part, token) each."""
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
            assert encoder.tokens[encoder.inbound.arriving(i)].tolist() == [part[4] for part in batch]
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


@settings(max_examples=up_to(40))
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


# where the LLM's mini-batches lie ---------------------------------------------------------------------------------

VISION, LLM = Phase("vision", BalancePolicy(), bytes_out=7), Phase("llm", BalancePolicy(), bytes_in=3)


def most_sent(plan: StepPlan, llm: Rearrangement, records: Sequence[Records], per_node: int) -> int:
    """The most bytes that one instance sends to other nodes' LLM, with Pi_M being `llm`."""
    vision = plan.encoders["vision"]
    images = [sum(record.phase[record.example == e] == 1) for record in records for e in range(record.examples)]
    outbound = llm.lift(images).compose(vision.inbound.inverse())
    encoded = vision.inbound.take(vision.tokens) * VISION.bytes_out
    text = llm.between_nodes(plan.text * LLM.bytes_in, per_node)
    return int((text + outbound.between_nodes(encoded, per_node)).max())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("instances", "per_node"), [(3, 1), (4, 2)])
def test_no_other_place_for_the_llms_batches_sends_less_between_nodes(instances: int, per_node: int, seed: int) -> None:
    """Text and what the encoders send count alike, by their bytes; lengths all differ, so no examples trade places."""
    draw = np.random.default_rng(seed)
    lengths = iter(draw.permutation(np.arange(20, 60)).tolist())
    step: list[list[Example]] = []
    for _ in range(instances):
        tokens = draw.integers(0, 20, 3).tolist()
        step.append([[("vision", 1 + 9 * t, t), (TEXT, n - t, n - t)] for t, n in zip(tokens, lengths, strict=False)])
    records = [Records.of(examples, ["vision"]) for examples in step]
    plan = plan_step(records, [VISION], LLM, nodes=Nodes(per_node))
    others = [plan.llm.relabel(list(places)) for places in permutations(range(instances))]
    assert most_sent(plan, plan.llm, records, per_node) == min(most_sent(plan, m, records, per_node) for m in others)


@pytest.mark.parametrize("seed", range(8))
def test_examples_of_one_length_stay_with_the_instance_that_sends_most_of_them(seed: int) -> None:
    """Every example is 11 tokens long; with two images it may be their encoder that sends the most of it."""
    draw = np.random.default_rng(seed)
    kinds = [[5, 3, 3], [8, 3], [2, 9], [4, 7]]  # text, then images
    chosen = [[kinds[kind] for kind in draw.integers(0, len(kinds), draw.integers(1, 6))] for _ in range(3)]
    step = [
        [[(TEXT, text, text), *(("vision", int(draw.integers(1, 90)), t) for t in images)] for text, *images in some]
        for some in chosen
    ]
    phases = Phase("vision", BalancePolicy()), Phase("llm", BalancePolicy())
    plan = plan_step([Records.of(examples, ["vision"]) for examples in step], phases[:1], phases[1], nodes=Nodes(1))
    encoded_on, sent = iter(plan.encoders["vision"].inbound.owners.tolist()), list[Counter[int]]()
    for instance, examples in enumerate(chosen):
        for text, *images in examples:
            sent.append(Counter({instance: text}))
            for tokens in images:
                sent[-1][next(encoded_on)] += tokens
    homes = [max(by_instance, key=by_instance.__getitem__) for by_instance in sent]
    owners = plan.llm.owners.tolist()
    at_home = sum(home == owner for home, owner in zip(homes, owners, strict=True))
    assert at_home == sum((Counter(homes) & Counter(owners)).values()), "no dealing out keeps more"


def test_different_plans_have_different_digests() -> None:
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
    ("change", "message"),
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
def test_records_that_are_none_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"example": [0, 0, 1], "phase": [0, 1, 0], "length": [5, 9, 2], "tokens": [5, 2, 2]}
    Records(2, **good).check(7, [None, None, None])
    with pytest.raises(PlanError, match=f"instance 7: .*{message}"):
        Records(2, **(good | change)).check(7, [None, None, None])


def test_an_unknown_modality_is_named() -> None:
    with pytest.raises(PlanError, match="example 1 has a part 'smell'; the phases are text, vision, audio"):
        Records.of([[], [("smell", 1)]], ENCODERS)
