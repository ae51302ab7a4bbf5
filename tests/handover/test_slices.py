"""Slices of parameters, as tensor-parallel receivers read them: bit for bit those of the whole, and few other bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import far_readers
from support.far_readers import Weights, far_reader
from support.handover_jobs import Job, changed
from support.members import BF16, F32, F64

from odc import Settings
from odc.handover import Reader
from odc.handover.handle import PublishedParameter, ShardOwner, WeightHandle
from odc.protocol import Word
from odc.runtime import ReadOnlyMember

BEFORE = 24  # bytes of a heap before its shard


class MemoryMember(ReadOnlyMember):
    """A member that has published version 1 of one shard; counts the bytes that are copied from it."""

    def __init__(self, rank: int, shard: torch.Tensor) -> None:
        self.rank, self.copied, self.expected = rank, 0, list[tuple[int, int]]()
        self._heap = torch.cat([torch.zeros(BEFORE, dtype=torch.uint8), shard.reshape(-1).view(torch.uint8)])

    def load(self) -> Mapping[Word, int]:
        return dict.fromkeys(Word, 1)

    def expect(self, extents: Sequence[tuple[int, int]]) -> None:
        self.expected = list(extents)

    def copy(self, offset: int, into: torch.Tensor) -> None:
        assert (offset, into.numel()) in self.expected, "another host would be asked twice"
        self.copied += into.numel()
        into.copy_(self._heap[offset : offset + into.numel()])

    def refuse_if_gone(self, doing: str) -> None:
        return

    def close(self) -> None:
        return


def shards_of(whole: torch.Tensor, dim: int, world: int) -> list[torch.Tensor]:
    """As FSDP2 cuts a parameter: equal chunks, of which the last are padded along dimension 0."""
    if dim:
        return [one.contiguous() for one in whole.chunk(world, dim)]
    rows = -(-len(whole) // world)
    padded = torch.full((rows * world, *whole.shape[1:]), 77, dtype=whole.dtype)
    padded[: len(whole)] = whole
    return list(padded.split(rows)) if rows else [padded] * world


def reader_of(whole: torch.Tensor, dim: int, world: int) -> Reader:
    """A reader of one parameter, "w", in as many shards."""
    shards = shards_of(whole, dim, world)
    one = PublishedParameter(
        ("w",), tuple(whole.shape), str(whole.dtype)[6:], dim, shards[0].numel(), offset=BEFORE, buffer_bytes=0, unit=0
    )
    owners = tuple(ShardOwner(rank, "", "", "here") for rank in range(world))
    handle = WeightHandle("root", owners, (one,), 0, 0, 1, 0, "", ())
    with mock.patch.object(Reader, "_attach"):
        reader = Reader(handle.to_json())
    reader._sources = [MemoryMember(rank, shard) for rank, shard in enumerate(shards)]
    return reader


@st.composite
def cut_parameters(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, tuple[int, int, int]]:
    """A whole parameter, the dimension in which it is sharded, over how many ranks, and a slice."""
    shape, world = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4)), draw(st.integers(1, 5))
    sharded = draw(st.integers(0, len(shape) - 1))
    if sharded:
        shape[sharded] *= world
    dim = draw(st.integers(0, len(shape) - 1))
    start, stop = sorted(draw(st.tuples(st.integers(0, shape[dim]), st.integers(0, shape[dim]))))
    values = torch.arange(math.prod(shape)) % 199
    return values.view(shape).to(draw(st.sampled_from([F32, BF16, F64]))), sharded, world, (dim, start, stop)


def bytes_of(whole: torch.Tensor, sharded: int, world: int, cut: tuple[int, int, int]) -> int:
    """What has to be read: the slice, or the shards that hold some of it."""
    dim, start, stop = cut
    if dim == 0 or start == stop:
        return whole.narrow(dim, start, stop - start).nbytes
    if dim != sharded or stop - start == whole.shape[dim]:
        return whole.nbytes
    each = whole.shape[dim] // world
    return whole.nbytes // world * sum(1 for one in range(world) if one * each < stop and start < (one + 1) * each)


@given(cut_parameters(), st.sampled_from(["made", "given", "strided", "wider"]))
def test_a_slice_is_that_of_the_whole_tensor(parameter: Any, kind: str) -> None:
    whole, sharded, world, cut = parameter
    expected = whole.narrow(cut[0], cut[1], cut[2] - cut[1])
    reader = reader_of(whole, sharded, world)
    if kind == "made":
        found = reader.read(slices={"w": cut}).tensors["w"]
    else:
        into = torch.full((*expected.shape, 2), -1.0, dtype=F64 if kind == "wider" else whole.dtype)[..., 0]
        found = into if kind == "strided" else into.contiguous()
        reader.read({"w": found}, slices={"w": cut})
        assert into.stride()[-1] == 2 or not into.numel()
    assert found.shape == expected.shape and torch.equal(found, expected.to(found.dtype))
    copied = sum(source.copied for source in reader._sources)  # type: ignore[attr-defined]
    assert copied == bytes_of(whole, sharded, world, cut)


def test_slices_beside_whole_parameters(job: Job) -> None:
    job.publish([1.5, 2.5])
    with Reader(job.handle) as source:
        found = source.read(slices={"u0.w": (0, 5, 11), "u1.v": (0, 7, 9)}).tensors
        assert {name: tensor.tolist() for name, tensor in found.items()} == {
            "u0.w": [1.5] * 3 + [2.5] * 3,
            "u0.b": [1.5] * 3 + [2.5] * 2,
            "u1.v": [2.5] * 2,
        }
        array = np.zeros(4)
        assert source.read({"u0.b": array}, slices={"u0.b": (0, 1, 5)}).tensors.keys() == {"u0.b"}
    assert array.tolist() == [1.5] * 2 + [2.5] * 2


def test_tied_names_may_have_slices_of_their_own(job: Job) -> None:
    job.publish([1.0, 2.0])
    parameters = json.loads(job.handle)["parameters"]
    parameters[0]["names"] = ["embed", "head", "third"]
    with Reader(changed(job.handle, parameters=parameters)) as source:
        made = source.read(slices={"embed": (0, 0, 4), "third": (0, 0, 4)}).tensors
        assert made["embed"] is made["third"] and made["embed"].tolist() == [1.0] * 4
        assert made["head"].tolist() == [1.0] * 8 + [2.0] * 7
        into = {"embed": torch.zeros(2), "head": torch.zeros(15), "third": torch.zeros(2)}
        source.read(into, slices={"embed": (0, 7, 9), "third": (0, 7, 9)})
    assert into["embed"].tolist() == into["third"].tolist() == [1.0, 2.0] and into["head"].tolist()[7:9] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("cut", "says"),
    [
        ({"u0.x": (0, 0, 1)}, "'u0.x' is not exported; leave it out of `slices`"),
        ({"u0.w": (1, 0, 1)}, r"the slice of 'u0.w' is along dimension 1 of a parameter of shape \(15,\)"),
        ({"u0.w": (-1, 0, 1)}, "the slice of 'u0.w' is along dimension -1"),
        ({"u0.w": (0, 0, 16)}, r"the slice of 'u0.w', \[0, 16\), is not within dimension 0 of \(15,\)"),
        ({"u0.w": (0, 3, 2)}, r"the slice of 'u0.w', \[3, 2\), is not within"),
        ({"u0.w": (0, -1, 2)}, r"the slice of 'u0.w', \[-1, 2\), is not within"),
        ({"u0.w": (0, 1)}, r"the slice of 'u0.w' must be three integers, \(dim, start, stop\), not \(0, 1\)"),
        ({"u0.w": (0, 0.5, 2)}, "the slice of 'u0.w' must be three integers"),
        ({"u0.w": 3}, "the slice of 'u0.w' must be three integers"),
    ],
)
def test_slices_that_do_not_fit_are_refused_by_name(job: Job, cut: dict[str, Any], says: str) -> None:
    """Also before anything is published: nothing is waited for."""
    with Reader(job.handle) as source, pytest.raises(ValueError, match=says):
        source.read(slices=cut)


def test_tensors_that_do_not_fit_their_slices_are_refused_by_name(job: Job) -> None:
    with Reader(job.handle) as source:
        with pytest.raises(ValueError, match=r"'u0.w' has shape \(4,\), not \(15,\)"):
            source.read({"u0.w": torch.zeros(15)}, slices={"u0.w": (0, 0, 4)})
        with pytest.raises(ValueError, match=r"'u1.v' is not in `into`; leave it out of `slices`"):
            source.read({"u0.w": torch.zeros(15)}, slices={"u1.v": (0, 0, 4)})


CUTS = {"u0.w": (0, 5990, 6010), "u1.v": (0, 4000, 5999)}  # over both ranks; on the second


def test_only_a_slice_crosses_from_another_host() -> None:
    with Job(far_readers.LAYOUT) as job, far_reader(job, changes=False) as (reader, engine):
        weights = Weights()
        weights.publish(job, 1)
        names = dict.fromkeys(CUTS)
        into = {name: torch.zeros(CUTS[name][2] - CUTS[name][1], dtype=reader.shapes()[name][1]) for name in names}
        reader.read(into, slices=CUTS)
        assert engine.taken() == sum(tensor.nbytes for tensor in into.values()) == 20 * 2 + 1999 * 4
        for name, expected in weights.expected(1).items():
            if name in into:
                assert torch.equal(into[name], expected[CUTS[name][1] : CUTS[name][2]]), name


def test_slices_of_copies_that_are_kept() -> None:
    """They are brought from version to version as whole shards, of which only the slices are handed out."""
    with Job(far_readers.LAYOUT, settings=Settings(changes="on")) as job, far_reader(job) as (reader, engine):
        weights, first = Weights(), 0
        for version in range(1, 5):
            weights.publish(job, version)
            found = reader.read(slices=CUTS)
            taken, first = engine.taken(), first or engine.nbytes
            assert found.version == version and (version == 1 or 0 < taken < first / 4)
            for name, expected in weights.expected(version).items():
                _, start, stop = CUTS.get(name, (0, 0, len(expected)))
                assert torch.equal(found.tensors[name], expected[start:stop]), (version, name)
