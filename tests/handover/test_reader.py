"""What a reader gets: whole parameters of one version, in tensors of its own or of the caller."""

from __future__ import annotations

import json

import pytest
import torch
from support.handover_jobs import Job, changed
from support.members import BF16, F32

from odc.handover import Reader


def test_all_shards_in_their_order_without_padding(job: Job) -> None:
    job.publish([1.5, 2.5])
    with Reader(job.handle) as source:
        version, tensors = source.read()
    assert version == 1
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "u0.w": [1.5] * 8 + [2.5] * 7,
        "u0.b": [1.5] * 3 + [2.5] * 2,
        "u1.v": [1.5] * 5 + [2.5] * 4,
    }
    assert [tensors[name].dtype for name in ("u0.w", "u0.b")] == [F32, BF16]


def test_a_version_is_there_when_the_last_rank_has_published_it(job: Job) -> None:
    with Reader(job.handle) as source:
        assert source.version == 0
        for member, version in ((0, 0), (1, 1), (1, 1), (0, 2)):
            job.group.publish(member)
            assert source.version == version


def test_what_was_read_does_not_change_any_more(job: Job) -> None:
    job.publish([1.0, 1.0])
    with Reader(job.handle) as source:
        first = source.read()
        job.publish([2.0, 2.0])
        assert set(first.tensors["u0.w"].tolist()) == {1.0}
        assert source.version == source.read().version == 2


def test_into_tensors_of_any_kind(job: Job) -> None:
    job.publish([1.5, 2.5])
    strided = torch.zeros(15, 2)
    into = {"u0.w": strided[:, 0], "u1.v": torch.zeros(9, dtype=torch.float64)}
    with Reader(job.handle) as source:
        assert source.read(into).tensors.keys() == into.keys()
    assert strided.tolist() == [[1.5, 0.0]] * 8 + [[2.5, 0.0]] * 7
    assert into["u1.v"].tolist() == [1.5] * 5 + [2.5] * 4


def test_tied_names_are_all_filled_and_share_one_tensor_when_made(job: Job) -> None:
    job.publish([1.0, 1.0])
    parameters = json.loads(job.handle)["parameters"]
    parameters[0]["names"] = ["embed", "head"]
    with Reader(changed(job.handle, parameters=parameters)) as source:
        made = source.read().tensors
        assert made["embed"] is made["head"]
        into = {"embed": torch.zeros(15), "head": torch.zeros(15)}
        source.read(into)
    assert torch.equal(into["embed"], torch.ones(15)) and torch.equal(into["head"], torch.ones(15))


def test_sharded_along_another_dimension(job: Job) -> None:
    job.publish([1.0, 2.0])
    parameters = json.loads(job.handle)["parameters"]
    parameters[0] |= {"shape": [4, 4], "shard_dim": 1}
    with Reader(changed(job.handle, parameters=parameters)) as source:
        into = {"u0.w": torch.zeros(4, 4, dtype=torch.float64)}
        assert source.read().tensors["u0.w"].tolist() == [[1.0, 1.0, 2.0, 2.0]] * 4
        assert source.read(into).tensors["u0.w"].tolist() == [[1.0, 1.0, 2.0, 2.0]] * 4


def test_shapes_and_dtypes_are_known_before_reading(job: Job) -> None:
    with Reader(job.handle) as source:
        assert source.shapes() == {"u0.w": ((15,), F32), "u0.b": ((5,), BF16), "u1.v": ((9,), F32)}


@pytest.mark.parametrize(
    ("into", "says"),
    [({"u0.x": torch.zeros(15)}, "'u0.x' is not exported"), ({"u0.w": torch.zeros(16)}, r"shape \(15,\)")],
)
def test_wrong_destinations(job: Job, into: dict[str, torch.Tensor], says: str) -> None:
    job.publish([1.0, 1.0])
    with Reader(job.handle) as source, pytest.raises(ValueError, match=says):
        source.read(into)
