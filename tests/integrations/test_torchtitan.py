"""torchtitan's stock trainer on odc against the same trainer on FSDP2: its debug model, on two CPU ranks.

torchtitan trains on accelerators, with a newer torch. For the CPU it is given a device module here, and its attention
becomes torch's, as flex attention has no backward on CPU.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.trainers import as_torchrun

from odc.experiments.data.bpe import ByteTokenizer

pytestmark = pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs torchtitan: make test-integrations")
Rows = list[tuple[float, float, float]]  # loss over all ranks, largest loss of a rank, gradient norm


class CpuModule:
    """What torchtitan asks of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(name="cpu", total_memory=2**30)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


def configured(folder: Path, changes: dict[str, dict[str, Any]]) -> Any:
    """Torchtitan's debug configuration, short and on CPU."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", CpuModule()
    if not hasattr(dist, "set_timeout"):  # newer than torch 2.13; torchtitan shortens timeouts after the first step
        dist.set_timeout = lambda timeout, group: None
    from torchtitan.hf_datasets import text_datasets
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    text_datasets.DATASETS["c4_test"].path = str(folder / "text")
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.hf_assets_path, config.dump_folder = str(folder / "tokenizer"), str(folder)
    short: dict[str, dict[str, Any]] = {
        "training": {"local_batch_size": 1, "global_batch_size": 4, "seq_len": 64, "steps": 3},
        "parallelism": {"spmd_backend": "partial_dtensor"},
        "checkpoint": {"enable": False},
        "validator": {"enable": False},
        "debug": {"seed": 0},
    }
    short["training"] |= {"mixed_precision_param": "float32"}
    for part, fields in [*short.items(), *changes.items()]:
        for name, value in fields.items():
            setattr(getattr(config, part), name, value)
    return config


def summed(spec: Any) -> Any:
    """The stock function that shards the model; gloo can sum, and not multiply as it sums."""
    from torch.distributed.fsdp import FSDPModule

    def sharded(*args: Any, **options: Any) -> Any:
        model = spec.parallelize_fn(*args, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return sharded


def train(
    rank: int, world: int, ours: bool, folder: Path, changes: dict[str, dict[str, Any]]
) -> tuple[Rows, list[str]]:
    """What the trainer logs, and the bases of a block's class."""
    as_torchrun(rank, world)
    if rank == 0:
        ByteTokenizer().save(folder / "tokenizer")
        (folder / "text").mkdir(parents=True, exist_ok=True)
        rows = [{"text": " ".join(f"word {i} of {j}" for i in range(2 + 7 * j % 31))} for j in range(64)]
        (folder / "text" / "rows.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    dist.barrier()
    config = configured(folder, changes)
    if ours:
        from odc.integrations.torchtitan import with_odc

        config = with_odc(config)
    else:
        config.training.disable_cuda_graphs = True
        config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=summed(config.model_spec))
    trainer, found = config.build(), []
    trainer.metrics_processor.log = lambda step, mean, most, norm, **unused: found.append((mean, most, norm))
    trainer.train()
    trainer.close()
    block = next(iter(trainer.model_parts[0].layers.values()))
    return found, [cls.__name__ for cls in type(block).__mro__]


BF16 = {"training": {"mixed_precision_param": "bfloat16"}}
COMPILED = {"compile": {"enable": True, "backend": "aot_eager"}}


@pytest.mark.parametrize("changes", [{}, BF16, COMPILED], ids=["fp32", "bf16", "compiled"])
def test_losses_are_those_of_fsdp2(ranks, tmp_path, changes: dict[str, dict[str, Any]]) -> None:
    theirs, stock = ranks(2).run(train, False, tmp_path, changes, timeout=500)[0]
    ours, block = ranks(2).run(train, True, tmp_path, changes, timeout=500)[0]
    assert "FSDPModule" in stock and "OdcModule" in block and "OdcModule" not in stock
    assert len(ours) == len(theirs) == 3
    close = 1e-3 if not changes else 2e-2
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=close), (ours, theirs)
        assert a[0] == pytest.approx(b[0], rel=1e-3)


def test_a_checkpoint_resumes_on_odc_and_on_fsdp2(ranks, tmp_path) -> None:
    saving = {"enable": True, "interval": 2, "last_save_model_only": False}
    changes = {"checkpoint": saving, "training": {"steps": 4}}
    whole, _ = ranks(2).run(train, True, tmp_path, changes, timeout=500)[0]
    shutil.rmtree(tmp_path / "checkpoint" / "step-4")
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "fsdp2" / "checkpoint")
    ours, _ = ranks(2).run(train, True, tmp_path, changes, timeout=500)[0]
    theirs, _ = ranks(2).run(train, False, tmp_path / "fsdp2", changes, timeout=500)[0]
    assert len(whole) == 4 and ours == whole[2:]
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-3)


def refused(rank: int, world: int, folder: Path) -> list[str]:
    from odc.errors import ConfigError
    from odc.integrations.torchtitan import parallelize, with_odc

    found = []
    for fields in ({"spmd_backend": "spmd_types"}, {"tensor_parallel_degree": 2}):
        config = configured(folder, {})
        try:
            with_odc(dataclasses.replace(config, parallelism=dataclasses.replace(config.parallelism, **fields)))
        except ConfigError as error:
            found.append(str(error))
    config = configured(folder, {})
    given = {"parallel_dims": None, "compile_config": None, "ac_config": None, "dump_folder": ""}
    with patch.object(torch.cuda, "is_available", lambda: True):
        for fields in ({"enable_cpu_offload": True}, {"disable_cuda_graphs": False}, {"disable_cuda_graphs": True}):
            asked = dataclasses.replace(config.training, **fields)
            try:
                parallelize(torch.nn.Linear(1, 1), training=asked, parallelism=config.parallelism, **given)
            except ConfigError as error:
                found.append(str(error))
    assert not config.training.disable_cuda_graphs and with_odc(config).training.disable_cuda_graphs
    return found


def test_other_parallelism_graphs_and_offloading_are_refused_in_one_line(ranks, tmp_path) -> None:
    backend, tensor, offloading, graphs, linear = ranks(2).run(refused, tmp_path)[0]
    assert "CUDA graphs" in graphs and "Linear: it is no decoder" in linear
    assert "training.enable_cpu_offload: leave it out" in offloading
    assert "set it to 'partial_dtensor'" in backend and "leave its degree at 1" in tensor


def reproducible(rank: int, world: int, folder: Path) -> list[bool]:
    """Of each unit that a run with `debug.deterministic` shards."""
    configured(folder, {})  # first: modules of torchtitan take its device when they are imported
    from odc import Settings
    from odc.integrations import torchtitan

    given: list[Any] = []
    sharded, made = torchtitan.fully_shard, torchtitan.with_odc

    def record(*modules: Any, settings: Any, **options: Any) -> Any:
        given.append(settings)
        return sharded(*modules, settings=settings, **options)

    recorded = patch.object(torchtitan, "fully_shard", record)
    chosen = patch.object(torchtitan, "with_odc", lambda config: made(config, Settings(prefetch=0)))
    try:
        with recorded, chosen:
            train(rank, world, True, folder, {"debug": {"seed": 0, "deterministic": True}, "training": {"steps": 1}})
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(settings.prefetch == 0 for settings in given)
    return [settings.reproducible for settings in given]


def test_sums_are_reproducible_where_the_run_is_deterministic(ranks, tmp_path) -> None:
    assert ranks(2).run(reproducible, tmp_path, timeout=500)[0] == [True] * 3


class Seeing(torch.nn.Module):
    """What `parallelize` asks of a decoder that has a vision encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({"0": torch.nn.Linear(2, 2)})
        self.vision_encoder = torch.nn.Module()
        self.vision_encoder.layers = torch.nn.ModuleDict({"0": torch.nn.Linear(2, 2)})


def parallelized(rank: int, world: int, folder: Path, settings: Any = None) -> list[str]:
    """Classes of a block of each stack."""
    as_torchrun(rank, world)
    config = configured(folder, {})
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC

    from odc.integrations.torchtitan import parallelize

    model = parallelize(
        Seeing(),
        parallel_dims=ParallelDims.from_config(config.parallelism, world),
        training=dataclasses.replace(config.training, disable_cuda_graphs=True),
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=FullAC.Config(),
        dump_folder="",
        settings=settings,
    )
    return [type(stack.layers["0"]).__name__ for stack in (model, model.vision_encoder)]


def test_blocks_of_a_vision_encoder_are_recomputed_too(ranks, tmp_path) -> None:
    decoder, encoder = ranks(2).run(parallelized, tmp_path)[0]
    assert "CheckpointWrapper" in decoder and encoder == "CheckpointWrapper"


def rounded(rank: int, world: int, folder: Path) -> str:
    from odc import Settings
    from odc.errors import ConfigError

    torch.use_deterministic_algorithms(True)
    try:
        parallelized(rank, world, folder, Settings(sums_dtype="int8"))
    except ConfigError as error:
        return str(error)
    finally:
        torch.use_deterministic_algorithms(False)
    return ""


def test_rounded_sums_are_refused_where_the_run_is_deterministic(ranks, tmp_path) -> None:
    assert "debug.deterministic with rounded sums" in ranks(2).run(rounded, tmp_path)[0]
