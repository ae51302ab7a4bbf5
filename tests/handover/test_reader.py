"""What a reader gets, in tensors of its own or of the caller; which rank it waits for, and how a job's end is named."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.handover_jobs import Job, changed
from support.members import BF16, F32
from torch.testing._internal.two_tensor import TwoTensor

from odc.errors import PeerLostError, WaitTimeoutError
from odc.handover import Reader
from odc.protocol import Word
from odc.protocol.protocol import abort


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


def test_new_tensors_lie_in_cpu_memory_where_torch_makes_others_on_a_device(job: Job) -> None:
    job.publish([1.5, 2.5])
    with torch.device("meta"), Reader(job.handle) as source:
        assert source.read().tensors["u1.v"].tolist() == [1.5] * 5 + [2.5] * 4


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


def test_into_arrays_of_other_libraries(job: Job) -> None:
    """By DLPack, whatever their strides and dtypes."""
    job.publish([1.5, 2.5])
    strided = np.zeros((15, 2), np.float32)
    into = {"u0.w": strided[:, 0], "u1.v": np.zeros(9, np.float64)}
    with Reader(job.handle) as source:
        found = source.read(into).tensors
    assert strided.tolist() == [[1.5, 0.0]] * 8 + [[2.5, 0.0]] * 7
    assert found["u0.w"].tolist() == strided[:, 0].tolist(), "the same memory"
    assert into["u1.v"].tolist() == [1.5] * 5 + [2.5] * 4


def test_arrays_that_cannot_be_filled_are_refused_by_name(job: Job) -> None:
    job.publish([1.5, 2.5])
    frozen = np.zeros(9, np.float64)
    frozen.flags.writeable = False
    with Reader(job.handle) as source:
        for wrong, says in (
            (frozen, "'u1.v' is read-only"),
            ([0.0] * 9, "'u1.v' is a list"),
            (np.array(["a"] * 9), "'u1.v' has no memory that torch can fill"),
            (torch.zeros(9, device="meta"), "'u1.v' is a Tensor on meta without memory"),
            (torch.zeros(9).to_sparse(), "'u1.v' is a Tensor on cpu without memory"),
            (TwoTensor(torch.zeros(9), torch.zeros(9)), "'u1.v' is a TwoTensor on cpu without memory .* `slices`"),
        ):
            with pytest.raises(ValueError, match=says):
                source.read({"u1.v": wrong})
    assert not frozen.any()


@pytest.mark.parametrize(
    ("into", "says"),
    [({"u0.x": torch.zeros(15)}, "'u0.x' is not exported"), ({"u0.w": torch.zeros(16)}, r"shape \(15,\)")],
)
def test_wrong_destinations(job: Job, into: dict[str, torch.Tensor], says: str) -> None:
    job.publish([1.0, 1.0])
    with Reader(job.handle) as source, pytest.raises(ValueError, match=says):
        source.read(into)


# waits ---------------------------------------------------------------------------------------------------------------


def test_waits_for_a_version_that_is_still_to_come(job: Job) -> None:
    job.publish([1.0, 1.0])
    timer = threading.Timer(0.1, lambda: job.publish([2.0, 2.0]))
    timer.start()
    with Reader(job.handle) as source:
        assert source.read(at_least=2).version == 2
    timer.join()


def test_a_version_older_than_asked_for_is_not_given_out(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.publish([1.0, 1.0])
    job.publish([2.0, 2.0])
    with Reader(job.handle) as source:
        monkeypatch.setattr(source, "_timeout_s", 0.1)  # not before it has attached, which a busy machine may delay
        assert source.read(at_least=2).version == 2
        with pytest.raises(WaitTimeoutError, match="rank 10 to publish version 3"):
            source.read(at_least=3)


def test_a_rank_that_does_not_publish_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.publish([1.0, 1.0])
    job.group.publish(0, 2.0)
    with Reader(job.handle) as source:
        monkeypatch.setattr(source, "_timeout_s", 0.1)  # not before it has attached, which a busy machine may delay
        with pytest.raises(WaitTimeoutError, match="rank 13 to publish version 2") as caught:
            source.read()
        assert caught.value.culprit == 13


def test_progress_of_the_rank_starts_the_deadline_anew(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes while the reader sleeps, and the rank computes meanwhile."""
    job.group.publish(0, 1.0)
    clock = [1000.0]

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            return time.sleep(seconds)
        clock[0] += 0.1
        job.group.members[1].protocol.touch("computing")
        if clock[0] > 1003.0 and source.version == 0:
            job.group.publish(1, 1.0)
        return None

    with Reader(job.handle, timeout_s=2.5) as source:
        monkeypatch.setattr("odc.deadlines.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
        assert source.read().version == 1
    assert clock[0] > 1003.0


def test_left_and_aborted_jobs(job: Job) -> None:
    job.publish([1.0, 1.0])
    with Reader(job.handle) as source:
        job.group.layouts[1].peer(1).board.store(Word.LEFT, 1)
        with pytest.raises(PeerLostError, match="rank 13 has left the job"):
            source.read()
        abort(job.group.layouts[0], "out of memory", 13)
        with pytest.raises(PeerLostError, match="aborted by rank 13: out of memory") as caught:
            source.read()
        assert caught.value.culprit == 13


def test_a_rank_that_aborts_and_ends_while_it_is_checked_is_not_blamed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may take the core away from the reader between its two questions."""
    job.publish([1.0, 1.0])
    with Reader(job.handle) as source:

        def alive() -> bool:
            abort(job.group.layouts[1], "rank 10 died in epoch 2", 10)
            return False

        monkeypatch.setattr(source._sources[1]._process, "alive", alive)
        with pytest.raises(PeerLostError, match="aborted by rank 10: rank 10 died") as caught:
            source._sources[1].refuse_if_gone("waiting")
        assert caught.value.culprit == 10
