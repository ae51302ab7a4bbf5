"""accelerate's FSDP2 path with `OdcFsdpPlugin`, on two CPU ranks, against an Accelerator without a plugin (DDP)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainers import as_torchrun, model, padded, samples

from odc import Settings

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make test-integrations",
)
Steps = list[tuple[float, float]]  # (loss, gradient norm)
WRAPPED = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Qwen2DecoderLayer"]}


def accelerator(fields: dict[str, Any] | None, **options: Any) -> Any:
    """An Accelerator on CPU with a plugin of `fields`, or without one."""
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    from odc.integrations.accelerate import OdcFsdpPlugin

    plugin = None if fields is None else OdcFsdpPlugin(**fields)
    if backend := options.pop("compiled", None):
        if plugin is not None:
            options["dynamo_plugin"] = TorchDynamoPlugin(backend=backend, use_regional_compilation=True)
    if shards := options.pop("sharded_over", None):
        from accelerate.utils import ParallelismConfig

        options["parallelism_config"] = ParallelismConfig(dp_shard_size=shards)
    return Accelerator(cpu=True, fsdp_plugin=plugin, **options)


def losses(made: Any, net: Any, optimizer: Any, loader: Any, steps: int) -> Steps:
    """Of `steps` optimizer steps, which `gradient_accumulation_steps` of the Accelerator divide into microbatches."""
    found, batches = [], iter(loader)
    while len(found) < steps:
        batch = next(batches)
        with made.accumulate(net):
            loss = net(**batch).loss
            made.backward(loss)
            if made.sync_gradients:
                norm = made.clip_grad_norm_(net.parameters(), 1.0)
                found.append((made.reduce(loss.detach(), "mean").item(), float(norm)))
            optimizer.step()
            optimizer.zero_grad()
    return found


def train(
    rank: int, world: int, fields: dict[str, Any] | None, folder: Path, options: dict[str, Any]
) -> tuple[Steps, Steps, Steps, dict[str, torch.Tensor]]:
    """Two steps, two more, those again from the state saved between; and the whole weights at the end."""
    as_torchrun(rank, world)
    made = accelerator(fields, gradient_accumulation_steps=2, **options)
    net = model()
    net.config.use_cache = False  # a cache grows when a block is recomputed, under FSDP2 too
    # With less eps, gradients that are zero but for rounding would become steps.
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    loader = torch.utils.data.DataLoader(samples(), batch_size=2, collate_fn=padded)
    net, optimizer, loader = made.prepare(net, optimizer, loader)
    first = losses(made, net, optimizer, loader, 2)
    made.save_state(str(folder))
    then = losses(made, net, optimizer, loader, 2)
    made.load_state(str(folder))
    again = losses(made, net, optimizer, loader, 2)
    return first, then, again, {name: weight.clone() for name, weight in made.get_state_dict(net).items()}


def apart(ours: Steps, theirs: Steps) -> float:
    assert len(ours) == len(theirs) > 0
    return max(abs(a - b) / b for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        (WRAPPED, {}),
        (WRAPPED | {"state_dict_type": "FULL_STATE_DICT", "activation_checkpointing": True}, {}),
        ({}, {}),
        # With sums in any order a weight might be rounded to another bf16 when steps are repeated.
        (WRAPPED | {"settings": Settings(reproducible=True)}, {"mixed_precision": "bf16"}),
        (WRAPPED, {"compiled": "eager"}),
    ],
    ids=["blocks", "whole states, recomputed", "root only", "bf16", "compiled"],
)
def test_a_loop_is_that_of_an_accelerator_without_the_plugin(ranks, tmp_path, fields, options) -> None:
    theirs = ranks(2).run(train, None, tmp_path / "ddp", options, timeout=500)[0]
    ours = ranks(2).run(train, fields, tmp_path / "odc", options, timeout=500)[0]
    close = 3e-2 if "mixed_precision" in options else 1e-4
    for mine, expected in zip(ours[:3], theirs[:3], strict=True):
        assert apart(mine, expected) < close, (ours[:3], theirs[:3])
    assert apart(ours[1], ours[2]) < 1e-5, "the same steps from the state saved before them"
    assert ours[3].keys() == theirs[3].keys()
    for name, weight in ours[3].items():
        torch.testing.assert_close(weight, theirs[3][name], rtol=1e-2, atol=5e-2 if close > 1e-4 else 2e-3)


def rounded(rank: int, world: int, dtype: torch.dtype) -> tuple[Steps, set[torch.dtype], set[torch.dtype]]:
    """Steps of a model whose weights are bf16's, loaded in `dtype`; dtypes of its weights and of AdamW's moments."""
    as_torchrun(rank, world)
    made = accelerator(WRAPPED | {"settings": Settings(reproducible=True)}, mixed_precision="bf16")
    net = model().bfloat16().to(dtype)
    net, optimizer = made.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3))
    loader = made.prepare(torch.utils.data.DataLoader(samples(), batch_size=2, collate_fn=padded))
    found = losses(made, net, optimizer, loader, 3)
    moments = {one[name].dtype for one in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")}
    return found, {weight.dtype for weight in net.parameters()}, moments


def test_a_model_loaded_in_bf16_is_trained_with_fp32_weights(ranks) -> None:
    loaded, weights, moments = ranks(2).run(rounded, torch.bfloat16)[0]
    assert weights == moments == {torch.float32}
    assert apart(loaded, ranks(2).run(rounded, torch.float32)[0][0]) < 1e-6


def units(rank: int, world: int) -> tuple[list[str], bool, list[int]]:
    """Names of the sharded modules, whether all are odc's, and of a minibatch of unequal counts the ranks' counts."""
    as_torchrun(rank, world)
    from torch.distributed.fsdp import FSDPModule

    from odc.fsdp import OdcModule, root_of

    made = accelerator(WRAPPED)
    net = model()
    net, optimizer = made.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    sharded = [name for name, module in net.named_modules() if isinstance(module, FSDPModule)]
    counts = []
    with net.minibatch():
        for length in range(4, 5 + 2 * rank):
            made.backward(net(**padded(samples([length]))).loss)
            counts.append(length)
    optimizer.step()
    assert root_of(net).minibatch.epoch == 1
    return sharded, all(isinstance(net.get_submodule(name), OdcModule) for name in sharded), counts


def test_units_are_accelerates_and_a_minibatch_may_have_unequal_counts(ranks) -> None:
    (names, all_ours, few), (_, _, many) = ranks(2).run(units)
    assert all_ours
    blocks = [f"model.layers.{i}" for i in range(2)]
    assert sorted(names) == sorted(["", "model.embed_tokens", *blocks, "model.norm", "lm_head"])
    assert (len(few), len(many)) == (1, 3)


def going_back(rank: int, world: int, old: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Three epochs of five batches; and those from the eighth on after a recovery. `old`: accelerate before 1.15."""
    as_torchrun(rank, world)
    from accelerate.utils import DataLoaderConfiguration

    from odc.integrations.accelerate import RepeatableBatches

    made = accelerator(None, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    loader = made.prepare(torch.utils.data.DataLoader(torch.arange(20 * world), batch_size=4, shuffle=True))
    skip = made.skip_first_batches

    def skipped(*given: Any) -> Any:
        rest = skip(*given)
        rest.iteration = 0 if old else rest.iteration
        return rest

    made.skip_first_batches = skipped
    batches = RepeatableBatches(made, loader)
    all_of_them, kept = [], None
    for number in range(15):
        kept = batches.state_dict() if number == 7 else kept
        all_of_them.append(next(batches).tolist())
    batches.load_state_dict(kept or {})
    return all_of_them, [next(batches).tolist() for _ in range(7, 15)]


@pytest.mark.parametrize("old", [False, True])
def test_batches_go_on_in_the_epochs_own_order(ranks, old: bool) -> None:
    for all_of_them, again in ranks(2).run(going_back, old):
        assert again == all_of_them[7:]
        assert all_of_them[5:7] != all_of_them[:2], "the case is not shuffled"


class Buckets(torch.utils.data.BatchSampler):
    """Batches of neighbours, in an order drawn from the global generator."""

    def __init__(self) -> None:
        super().__init__(range(8), 2, False)

    def __iter__(self) -> Any:
        return iter([[2 * i, 2 * i + 1] for i in torch.randperm(4).tolist()])


class Epochs(Buckets):
    """In an order drawn anew in each epoch, and whenever that begins again."""

    def set_epoch(self, epoch: int) -> None:
        self.generator = torch.Generator().manual_seed(epoch)

    def __iter__(self) -> Any:
        return iter([[2 * i, 2 * i + 1] for i in torch.randperm(4, generator=self.generator).tolist()])


def own_order(rank: int, world: int) -> tuple[list[list[int]], list[list[int]]]:
    """Batches of two epochs, and those from the second epoch's second batch on after a recovery."""
    from odc.integrations.accelerate import RepeatableBatches

    as_torchrun(rank, world)
    made = accelerator(None)
    loader = made.prepare(torch.utils.data.DataLoader(torch.arange(8), batch_sampler=Epochs()))
    batches, count = RepeatableBatches(made, loader), 4 // world
    first = [next(batches).tolist() for _ in range(count + 1)]
    kept = batches.state_dict()
    rest = [next(batches).tolist() for _ in range(count - 1)]
    batches.load_state_dict(kept)
    return first + rest, [next(batches).tolist() for _ in range(count - 1)]


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_sampler_of_ones_own_learns_of_each_epoch(ranks, world: int) -> None:
    orders = [torch.randperm(4, generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in range(2)]
    expected = [[2 * i, 2 * i + 1] for order in orders for i in order]
    for rank, (found, again) in enumerate(ranks(world).run(own_order)):
        assert found == expected[rank::world]
        assert again == found[-len(again) :]


def orders(rank: int, world: int) -> dict[str, str]:
    """Of each order of samples why `RepeatableBatches` refuses it, or nothing."""
    from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler

    from odc.errors import ConfigError
    from odc.integrations.accelerate import RepeatableBatches

    as_torchrun(rank, world)
    from accelerate.utils import DataLoaderConfiguration

    given: dict[str, dict[str, Any]] = {
        "sequential": {"batch_size": 2},
        "listed": {"batch_size": 2, "sampler": [3, 1, 2, 0]},
        "shuffled": {"batch_size": 2, "shuffle": True},
        "seedable": {"batch_size": 2, "shuffle": True},
        "subset": {"batch_size": 2, "sampler": SubsetRandomSampler(range(4))},
        "weighted": {"batch_size": 2, "sampler": WeightedRandomSampler([1.0] * 8, 8)},
        "buckets": {"batch_sampler": Buckets()},
        "epochs": {"batch_sampler": Epochs()},
    }
    found = {}
    for name, options in given.items():
        as_torchrun(rank, world)
        seeded = DataLoaderConfiguration(use_seedable_sampler=name != "shuffled")
        made = accelerator(None, dataloader_config=seeded)
        loader = made.prepare(DataLoader(torch.arange(8), **options))
        try:
            RepeatableBatches(made, loader)
            found[name] = ""
        except ConfigError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_an_order_that_depends_on_what_was_drawn_is_refused(ranks, world: int) -> None:
    found = ranks(world).run(orders)[0]
    assert "use_seedable_sampler=True" in found.pop("shuffled")
    for name in ("subset", "weighted"):
        assert "RandomSampler: give it set_epoch()" in found.pop(name)
    assert "order of Buckets: give it set_epoch()" in found.pop("buckets")
    assert set(found.values()) == {""}, found


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "version": ({"fsdp_version": 1}, {}, "use fsdp_version=2"),
    "offloading": ({"cpu_offload": True}, {}, "leave it out"),
    "loading": ({"cpu_ram_efficient_loading": True}, {}, "load the model on every rank"),
    "fp16": ({"mixed_precision_policy": "fp16"}, {}, "use 'bf16'"),
    "offloaded activations": (
        {"activation_checkpointing": True, "activation_checkpointing_offload": True},
        {},
        "use activation_checkpointing alone",
    ),
    "fp8": ({"mixed_precision_policy": "fp8"}, {}, "use 'bf16'"),
    "compilation": ({}, {"dynamo_backend": "eager"}, "use_regional_compilation=True"),
    "parallelism": ({}, {"sharded_over": 2}, "odc shards over all ranks"),
}


def refused(rank: int, world: int) -> dict[str, str]:
    as_torchrun(rank, world)
    from odc.errors import ConfigError

    found = {}
    for name, (fields, options, _) in REFUSED.items():
        as_torchrun(rank, world)
        try:
            made = accelerator(fields, **options)
            net = model()
            made.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        except ConfigError as error:
            found[name] = str(error)
    as_torchrun(rank, world)
    accelerator(None)
    try:
        from odc.integrations.accelerate import OdcFsdpPlugin

        OdcFsdpPlugin()
    except ConfigError as error:
        found["late"] = str(error)
    return found


def test_what_odc_cannot_do_is_refused_in_one_line(ranks) -> None:
    found = ranks(2).run(refused)[0]
    expected = {name: words for name, (_, _, words) in REFUSED.items()} | {"late": "make OdcFsdpPlugin first"}
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        assert words in found[name] and "\n" not in found[name], found[name]
