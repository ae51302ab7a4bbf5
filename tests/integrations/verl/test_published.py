"""What verl's engine hands a rollout beside each rank: the bits that verl would have gathered, without a collective."""

from __future__ import annotations

import asyncio
import threading
import uuid
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.far_readers import LAYOUT, Weights, far_handle
from support.handover_jobs import Job
from support.ranks import RankPool
from support.verl import import_verl, join_as_verl, needs_verl
from support.verl_engine import build, gathered, loss_with_metrics, rows

from odc import Settings
from odc.handover import Reader, read_groups

pytestmark = needs_verl

held = SimpleNamespace()  # of a rank: its engine
SMALL = 6000  # bytes: less than the embedding, and room for a few of the other parameters


def start(rank: int, world: int, model: Path, changes: dict[str, Any]) -> None:
    join_as_verl(rank, world)
    held.engine = build(model, "odc", **changes)
    if not hasattr(held.engine.module, "peft_config"):
        held.engine.module.register_buffer("temperature", torch.tensor([0.5]))  # which no rank shards


def step() -> None:
    with held.engine.train_mode():
        data = rows([9, 30], 2 * dist.get_rank(), use_dynamic_bsz=True, max_token_len_per_gpu=100)
        held.engine.train_batch(data, loss_with_metrics)


def refuse(*unused: Any, **given: Any) -> None:
    raise AssertionError("a parameter was gathered")


def bucketed() -> Any:
    """The module with verl's sender and receiver; the import of its package asks for vLLM or SGLang."""
    import verl

    path = Path(verl.__file__).parent / "workers" / "rollout" / "vllm_rollout" / "bucketed_weight_transfer.py"
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def received(weights: Any, nbytes: int = 3 * SMALL) -> tuple[dict[str, torch.Tensor], list[int]]:
    """What verl's receiver gets of verl's sender by shared memory in buckets of `nbytes`, and how many in each."""
    address, found = f"ipc://@{uuid.uuid4()}", dict[str, torch.Tensor]()
    counts: list[int] = []

    def load(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        counts.append(len(bucket))
        found.update((name, value.clone()) for name, value in bucket)

    theirs = bucketed()
    receiver = theirs.BucketedWeightReceiver(address, torch.device("cpu"), use_shm=True)
    thread = threading.Thread(target=receiver.receive_weights, args=(load,), daemon=True)
    thread.start()
    sender = theirs.BucketedWeightSender(address, use_shm=True)
    sender.bucket_size = nbytes
    asyncio.run(sender.async_send_weights(weights))
    thread.join()
    return found, counts


def sync_three_times(rank: int, world: int, dtype: torch.dtype) -> list[int]:
    """Each rank feeds its own rollout, and trains on; returns the sizes of the last buckets."""
    from torch.distributed.tensor import DTensor

    from odc.integrations.verl import published

    counts: list[int] = []
    before: dict[str, torch.Tensor] = {}
    for _ in range(3):
        expected = gathered(held.engine)
        small = mock.patch.object(published, "GROUP_BYTES", SMALL)
        with small, mock.patch.object(DTensor, "full_tensor", refuse):
            weights, adapter = held.engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
            assert adapter is None
            found, counts = received(weights)
        assert found.keys() == expected.keys() and "temperature" in found
        for name, value in expected.items():
            kept = torch.float32 if name == "temperature" else dtype
            assert found[name].dtype == kept and torch.equal(found[name], value.to(kept)), name
        assert not before or any(not torch.equal(before[name], found[name]) for name in found)
        before = found
        dist.barrier()  # as verl waits for all rollouts before it trains on
        step()
    return counts


@pytest.mark.parametrize(
    "changes",
    [{}, {"mixed_precision": {"param_dtype": "bf16"}}, {"fsdp_size": 1}],
    ids=["fp32", "bf16", "hybrid sharding"],
)
def test_a_rollout_beside_a_rank_gets_what_verl_gathers(actor: RankPool, model: Path, changes: Any) -> None:
    actor.run(start, model, changes)
    dtype = torch.bfloat16 if "mixed_precision" in changes else torch.float32
    for counts in actor.run(sync_three_times, dtype):
        assert len(counts) > 2, "all weights were in one bucket"


def keep_all(rank: int, world: int) -> None:
    """Some rollouts collect tensors before they load any."""
    from odc.integrations.verl import published

    expected = gathered(held.engine)
    with mock.patch.object(published, "GROUP_BYTES", SMALL):
        found = dict(held.engine.get_per_tensor_param()[0])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_rollout_may_keep_what_it_was_given(actor: RankPool, model: Path) -> None:
    actor.run(start, model, {})
    actor.run(keep_all)


def test_what_no_rank_shards_comes_on_the_device_of_the_engine_too() -> None:
    """On the meta device, which every machine has."""
    import_verl("odc.integrations.verl.published")
    from odc.integrations.verl import published

    module = mock.Mock(**{"parameters.return_value": iter([torch.empty(1, device="meta")])})
    reader = mock.Mock(**{"read.return_value": iter([("temperature", torch.tensor([0.5]))])})
    with mock.patch.object(published, "published"):
        ((_, tensor),) = published.published_here(SimpleNamespace(module=module), reader)
    assert tensor.device.type == "meta"


def publishes_late(rank: int, world: int) -> tuple[int, int, int]:
    """Versions before and after the weights are asked for, and after the first is."""
    from odc.handover import version

    versions = [version(held.engine.module)]
    weights, _ = held.engine.get_per_tensor_param()
    versions.append(version(held.engine.module))
    next(iter(weights))
    versions.append(version(held.engine.module))
    dist.barrier()
    return versions[0], versions[1], versions[2]


def test_nothing_is_published_for_weights_that_no_rollout_asks_for(actor: RankPool, model: Path) -> None:
    """A checkpoint engine, which has published, is handed weights that it does not ask for."""
    actor.run(start, model, {})
    for before, handed, asked in actor.run(publishes_late):
        assert before == handed == asked - 1


def changed(rank: int, world: int) -> int:
    """Bring a copy up to date by the deltas of all ranks, as verl's `delta_sharded`; returns their elements."""
    before = {name: value.bfloat16() for name, value in gathered(held.engine).items()}
    held.engine.prime_delta_snapshots()
    step()
    count = 0
    for slots, _, counts, index, values, group in held.engine.get_per_tensor_param_delta_shard()[0]:
        (name, shape), *others = [slot[:2] for slot in slots]
        assert not others and len(counts) == 1
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, (index, values), group=group)
        for where, what in parts:
            count += where.numel()
            before[name].view(-1)[where] = what
        assert before[name].shape == tuple(shape)
    after = gathered(held.engine)
    assert all(torch.equal(before[name], value.bfloat16()) for name, value in after.items() if name != "temperature")
    return count


def test_the_deltas_that_verl_asks_for_are_what_a_step_changes(actor: RankPool, model: Path) -> None:
    """For `rollout.checkpoint_engine.backend=delta_sharded`; it needs NCCL, and is not run here."""
    actor.run(start, model, {})
    counts = actor.run(changed)
    assert counts[0] == counts[1] > 0


def unmerged(rank: int, world: int) -> None:
    expected = gathered(held.engine, base_sync_done=True)
    ours, adapter = held.engine.get_per_tensor_param(base_sync_done=True)
    found = {name: value.clone() for name, value in ours}
    assert adapter is not None and found.keys() == expected.keys()
    assert all("lora_" in name and torch.equal(found[name], value) for name, value in expected.items())


def test_adapters_are_left_to_verl(actor: RankPool, model: Path) -> None:
    actor.run(start, model, {"of_model": {"lora_rank": 4}})
    actor.run(unmerged)


def gathers(rank: int, world: int) -> tuple[int, int]:
    """Versions before and after a rollout beside the rank gets its weights; shards are taken to be on several hosts."""
    from odc.handover import version
    from odc.protocol import RankGrid

    expected, before = gathered(held.engine), version(held.engine.module)
    with mock.patch.object(RankGrid, "shards_span_hosts", True):
        weights, adapter = held.engine.get_per_tensor_param()
        found = {name: value.clone() for name, value in weights}
    assert adapter is None and found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    return before, version(held.engine.module)


def test_shards_on_several_hosts_are_gathered(actor: RankPool, model: Path) -> None:
    """Each rank of a host would read the whole model over the network."""
    actor.run(start, model, {})
    for before, after in actor.run(gathers):
        assert before == after, "weights were published, to be read by each rank"


def test_verls_sender_takes_what_a_reader_reads() -> None:
    """As docs/checkpoint_engine.md has it, for a rollout of a program of one's own."""
    import_verl("verl.workers.rollout")
    with Job(LAYOUT) as job:
        weights = Weights()
        weights.publish(job, 1)
        with Reader(job.handle) as reader:
            groups = read_groups(reader, SMALL, 1)
            weights_of = (one for group in groups for one in group.items())
            found, counts = received(weights_of, 24_100)
    expected = weights.expected(1)
    assert found.keys() == expected.keys() and counts == [2, 1]
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_process_of_rollouts_keeps_a_copy_of_shards_on_other_hosts() -> None:
    """To which it applies what changes."""
    import_verl()
    import_verl("odc.integrations.verl.checkpoint_engine")
    from odc.integrations.verl.checkpoint_engine import OdcCheckpointEngine

    with Job(LAYOUT, settings=Settings(changes="on")) as job, far_handle(job) as (handle, _):
        rollouts = OdcCheckpointEngine(bucket_size=SMALL)._reader
        with rollouts._attached(handle, "cpu") as reader:
            assert len(reader._kept) == 2
