"""verl's checkpoint engine `odc`: what a rollout process reads after each step is what verl would have gathered."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.far_readers import Moved
from support.on_ranks import on_hosts
from support.ranks import RankPool
from support.verl import import_verl, join_as_verl, needs_verl
from support.verl_engine import build, gathered, loss_with_metrics, rows

from odc.errors import ConfigError, StaleVersionError, UnsupportedError

pytestmark = needs_verl

held = SimpleNamespace()  # of a rank: its engines
SMALL = 6000  # bytes: less than the embedding, and room for a few of the other parameters


def checkpoint_engine(**options: Any) -> Any:
    import_verl()
    import_verl("odc.integrations.verl.checkpoint_engine")
    from verl.checkpoint_engine import CheckpointEngineRegistry

    return CheckpointEngineRegistry.new("odc", **{"bucket_size": SMALL, "timeout_s": 60.0, **options})


def start(rank: int, world: int, model: Path, strategy: str, changes: dict[str, Any]) -> None:
    """An actor, and beside it a reference model, as verl has them in one process."""
    join_as_verl(rank, world)
    held.engine = build(model, strategy, **changes)
    held.engine.module.register_buffer("temperature", torch.tensor([0.5]))  # which no rank shards
    if strategy == "odc":  # that of fsdp2 pins memory
        held.reference = build(model, strategy, forward_only=True)
    held.sync = checkpoint_engine(is_master=rank == 0)


def prepare(rank: int, world: int) -> Any:
    """What this rank hands to the rollout, and after that what verl would have sent."""
    learned = held.sync.prepare()
    handed, _ = held.engine.get_per_tensor_param()
    assert asyncio.run(held.sync.send_weights(handed)) == {}
    return learned, gathered(held.engine)


def step(rank: int, world: int) -> None:
    with held.engine.train_mode():
        held.engine.train_batch(
            rows([9, 30], 2 * rank, use_dynamic_bsz=True, max_token_len_per_gpu=100), loss_with_metrics
        )


def infer(rank: int, world: int) -> None:
    """An evaluation epoch, which publishes anew."""
    held.engine.module.publish()


def received(rollout: Any, learned: list[Any]) -> dict[str, torch.Tensor]:
    """What a rollout process of two is given by verl, tensor by tensor."""
    for_actor, for_rollout = type(rollout).build_topology(2, 2, [*learned, rollout.prepare(), None])
    assert for_actor == {} and [len(each) for each in for_rollout.values()] == [2]
    return read(rollout, **{name: each[1] for name, each in for_rollout.items()})


def read(rollout: Any, published: Any) -> dict[str, torch.Tensor]:
    rollout.init_process_group(published)

    async def receive() -> dict[str, torch.Tensor]:
        found = {}
        async for name, tensor in rollout.receive_weights(global_steps=1):
            await asyncio.sleep(0.01)  # in which the next group is read
            found[name] = tensor.clone()
        return found

    try:
        return asyncio.run(receive())
    finally:
        rollout.finalize()


@pytest.mark.parametrize(
    "changes",
    [{}, {"mixed_precision": {"param_dtype": "bf16"}}, {"fsdp_size": 1}],
    ids=["fp32", "bf16", "hybrid sharding"],
)
def test_a_rollout_reads_after_each_step_what_verl_gathers(actor: RankPool, model: Path, changes: Any) -> None:
    actor.run(start, model, "odc", changes)
    rollout, dtype = checkpoint_engine(), torch.bfloat16 if "mixed_precision" in changes else torch.float32
    before: dict[str, torch.Tensor] = {}
    for _ in range(3):
        outcomes = actor.run(prepare)
        assert outcomes[1][0] is None, "one rank is enough"
        found = received(rollout, [learned for learned, _ in outcomes])
        gathered = outcomes[0][1]
        assert found.keys() == gathered.keys()
        for name, value in gathered.items():
            published = dtype if name != "temperature" else torch.float32
            assert found[name].dtype == published and torch.equal(found[name], value.to(published)), name
        assert before.keys() != found.keys() or any(not torch.equal(before[name], found[name]) for name in found)
        before = found
        actor.run(step)


@on_hosts(2, 1)
def test_a_rollout_on_another_host_reads_only_what_a_step_changes(rank: int, world: int, model: Path) -> None:
    """Beside each rank is a rollout of its host, which maps the shards there, and to which the others are far."""
    os.environ["RAY_LOCAL_WORLD_SIZE"] = "1"  # as verl's workers have it on Ray
    changes = {"odc": {"changes": "on"}, "mixed_precision": {"param_dtype": "bf16"}, "lr": 1e-6}
    start(rank, world, model, "odc", changes)
    rollout, learned = checkpoint_engine(bucket_size=1 << 20), [None] * world
    before: dict[str, torch.Tensor] = {}
    moved: Moved | None = None
    for _ in range(4):
        published, gathered = prepare(rank, world)
        dist.all_gather_object(learned, published)
        found = read(rollout, learned[0])
        assert found.keys() == gathered.keys()
        for name, value in gathered.items():
            kept = torch.float32 if name == "temperature" else torch.bfloat16
            assert found[name].dtype == kept and torch.equal(found[name], value.to(kept)), name
        _, reader = rollout._reader._reader
        if moved is not None:
            crossed, whole = moved.taken(), sum(one.nbytes for one in reader._handle.parameters)
            assert 0 < crossed <= 0.2 * whole, f"{crossed} bytes of {whole}"
            assert any(not torch.equal(before[name], found[name]) for name in found), "the step has changed nothing"
        moved, before = moved or Moved(reader), found
        dist.barrier()  # as verl waits for all rollouts before it trains on
        step(rank, world)


def test_buckets_of_gigabytes_which_verl_has_by_default_are_read_in_parts() -> None:
    asked = list[int]()
    rollout = checkpoint_engine(bucket_size=2 << 30)
    with mock.patch.object(
        type(rollout._reader), "read", lambda self, learned, nbytes: asked.append(nbytes) or iter(())
    ):
        received(rollout, [SimpleNamespace(), None])
    assert asked == [64 << 20]


def test_beside_a_gpu_every_tensor_comes_there(actor: RankPool, model: Path) -> None:
    """CUDA's handles, which memory of the CPU does not have, are handed on by verl: to TensorRT-LLM and (0.9.0) SGLang
    of all tensors, to vLLM of any larger than a bucket.
    """
    actor.run(start, model, "odc", {})
    outcomes, moved = actor.run(prepare), list[torch.Tensor]()
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.Tensor, "cuda", lambda self: (moved.append(self), self)[1]),
    ):
        found = received(checkpoint_engine(), [learned for learned, _ in outcomes])
    assert min(value.nbytes for value in found.values()) <= SMALL < max(value.nbytes for value in found.values())
    assert [tensor.numel() for tensor in moved] == [value.numel() for value in found.values()]


def test_weights_that_change_while_they_are_read_are_refused(actor: RankPool, model: Path) -> None:
    actor.run(start, model, "odc", {})
    learned = [learned for learned, _ in actor.run(prepare)]
    actor.run(infer)
    with pytest.raises(StaleVersionError, match="version 2 was published while version 1 was still to be read"):
        received(checkpoint_engine(), learned)


def test_a_rollout_follows_an_actor_that_is_started_anew(model: Path) -> None:
    rollout = checkpoint_engine()
    for _ in range(2):
        actor = RankPool(2)
        actor.run(start, model, "odc", {})
        outcomes = actor.run(prepare)
        assert received(rollout, [learned for learned, _ in outcomes]).keys() == outcomes[0][1].keys()
        actor.close()


def refused(rank: int, world: int, model: Path, strategy: str, of_model: Any) -> str:
    start(rank, world, model, strategy, {"of_model": of_model})
    try:
        held.sync.prepare()
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("strategy", "of_model", "why"),
    [
        ("odc", {"lora_rank": 4}, "does not export weights of LoRA"),
        ("fsdp2", {}, "needs actor_rollout_ref.actor.strategy=odc"),
    ],
)
def test_what_is_refused(actor: RankPool, model: Path, strategy: str, of_model: Any, why: str) -> None:
    first, second = actor.run(refused, model, strategy, of_model)
    assert why in first and second == (first if strategy == "odc" else "")
    engine = checkpoint_engine()
    with pytest.raises(ConfigError, match=r"strategy=odc"):
        type(engine).build_topology(1, 1, [None, None])
    with pytest.raises(ConfigError, match="nothing is known of what is to be read"):
        asyncio.run(anext(engine.receive_weights()))
