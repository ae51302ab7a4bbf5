"""Which rows move, and that they arrive whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.verl import import_verl, needs_verl

from odc.balance import lower_bound, quadratic
from odc.errors import PlanError

pytestmark = needs_verl

COST = quadratic(64, 1)
lengths_by_rank = st.integers(1, 4).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(
            st.lists(st.integers(1, 200), min_size=size, max_size=4 * size).map(
                lambda row: row[: len(row) // size * size]
            ),
            min_size=1,
            max_size=5,
        ),
    )
)


@given(lengths_by_rank)
def test_every_row_has_one_owner_groups_stay_whole_and_ranks_end_together(drawn: tuple[int, list[list[int]]]) -> None:
    import_verl()
    from odc.integrations.verl.rebalance import owners_of

    size, lengths = drawn
    owners = owners_of(lengths, COST, size)
    assert [len(rows) for rows in owners] == [len(rows) for rows in lengths]
    assert {owner for rows in owners for owner in rows} == set(range(len(lengths)))
    chunks, chunk_owners = [], []
    for rows, owner_rows in zip(lengths, owners, strict=True):
        for at in range(0, len(rows), size):
            assert len(set(owner_rows[at : at + size])) == 1
            chunks.append(sum(COST(length) for length in rows[at : at + size]))
            chunk_owners.append(owner_rows[at])
    loads = [0.0] * len(lengths)
    for chunk, owner in zip(chunks, chunk_owners, strict=True):
        loads[owner] += chunk
    before = max(sum(COST(length) for length in rows) for rows in lengths)
    assert max(loads) <= before * (1 + 1e-9)
    # Longest first is within 4/3 of the optimum.
    assert max(loads) <= 4 / 3 * 1.02 * max(lower_bound(chunks, len(lengths)), max(chunks))


def test_nothing_moves_where_little_is_gained() -> None:
    import_verl()
    from odc.integrations.verl.rebalance import owners_of

    assert owners_of([[500, 500], [499, 500]], float) == [[0, 0], [1, 1]]
    assert owners_of([[500, 500], [1, 1]], float) in ([[0, 1], [1, 0]], [[0, 1], [0, 1]])


def test_what_does_not_fit_is_named() -> None:
    import_verl()
    from odc.integrations.verl.rebalance import refuse_long

    refuse_long([[5, 5], [10]], 10)
    with pytest.raises(PlanError, match="data-parallel rank 1: sample 2 \\(2 together\\) has 11 tokens"):
        refuse_long([[5, 5], [1, 1, 5, 6]], 10, 2)
    with pytest.raises(PlanError, match="rank 0 has 3 samples, not a multiple of 2"):
        refuse_long([[5, 5, 5]], 20, 2)


def batch(rank: int, lengths: list[int]) -> Any:
    from tensordict import NonTensorData, TensorDict
    from verl.utils import tensordict_utils as tu

    rows = [torch.full((length,), 100 * rank + i) for i, length in enumerate(lengths)]
    data = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
            "reward": torch.tensor([100.0 * rank + i for i in range(len(lengths))]),
        },
        batch_size=[len(lengths)],
    )
    tu.assign_non_tensor_stack(data, "uid", [f"{rank}-{i}" for i in range(len(lengths))])
    tu.assign_non_tensor(data, dp_size=7, name=f"of rank {rank}", global_token_num=NonTensorData([1, 2, 3]))
    return data


def moved(rank: int, world: int, lengths: list[list[int]], owners: list[list[Any]]) -> Any:
    import_verl()
    from verl.utils import tensordict_utils as tu

    from odc.integrations.verl.rebalance import move_rows, send_rows

    move = move_rows if isinstance(owners[0][0], int) else send_rows
    data = move(batch(rank, lengths[rank]), owners, dist.group.WORLD)
    assert data["dp_size"] == 7 and data["name"] == f"of rank {rank}", "what is not of a row was mixed up"
    assert tu.get(data, "global_token_num") == [1, 2, 3], "a list of the batch was taken for rows"
    assert data.batch_size == torch.Size([len(data["reward"])]), data.batch_size
    ids = [row.tolist() for row in data["input_ids"].unbind()]
    return [
        (row[0], len(row), reward, uid)
        for row, reward, uid in zip(ids, data["reward"].tolist(), data["uid"], strict=True)
    ]


@pytest.mark.parametrize(
    "owners",
    [[[0, 0, 0], [1, 1], [2]], [[0, 1, 0], [1, 0], [2]], [[1, 1, 1], [2, 2], [0]]],
    ids=["nothing moves", "some move", "all move"],
)
def test_rows_arrive_whole_those_that_stay_first(ranks, owners) -> None:
    lengths = [[3, 5, 2], [4, 1], [6]]
    expected: list[list[Any]] = [[], [], []]
    for here in range(3):
        for source in [here, *(r for r in range(3) if r != here)]:
            for i, owner in enumerate(owners[source]):
                if owner == here:
                    number = 100 * source + i
                    expected[here].append((number, lengths[source][i], float(number), f"{source}-{i}"))
    assert ranks(3).run(moved, lengths, owners) == expected


def test_a_row_may_go_to_several_ranks(ranks) -> None:
    found = ranks(3).run(moved, [[3, 5], [4], [6]], [[[0, 2], [1]], [[0, 1, 2]], [[2]]])
    assert [[uid for *_, uid in rows] for rows in found] == [["0-0", "1-0"], ["1-0", "0-1"], ["2-0", "0-0", "1-0"]]
    assert found[2][1] == (0, 3, 0.0, "0-0") and found[2][2] == (100, 4, 100.0, "1-0")
