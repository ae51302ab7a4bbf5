"""The ledger is computed from a config alone; real jobs, over the same ranks, reserve what it says."""

from __future__ import annotations

import io
import re
import textwrap
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from odc import Settings, fully_shard
from odc.blocks import blocks_of
from odc.doctor.ledger import MemoryLedger, ledger_table, memory_ledger, model_of, regions_of
from odc.errors import ConfigError
from odc.fsdp import root_of
from odc.protocol import RankGrid
from odc.protocol.regions import Regions
from odc.simulate.catalog import MODELS

TINY = {
    "model_type": "qwen2",
    "vocab_size": 57,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}


@pytest.mark.parametrize("settings", [Settings(), Settings(reproducible=True, second_buffer=True)])
@on_ranks(2)
def test_a_real_job_reserves_what_the_ledger_says(rank: int, world: int, settings: Settings) -> None:
    pytest.importorskip("transformers")
    config = TINY | {"tie_word_embeddings": True}
    shapes = model_of(config)
    model = cast(Any, model_of(config).to_empty(device="cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    blocks = blocks_of(model)
    model.lm_head.weight = model.model.embed_tokens.weight
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy, settings=settings)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(9)[None]).logits.float().sum().backward()
    optimizer.step()
    layout = root_of(model).layout
    found = regions_of(shapes, blocks_of(shapes), world, 1, settings, on_device=False)
    assert sorted(map(_size, found.requests())) == sorted(map(_size, layout.requests()))
    assert found.ring == layout.ring
    reserved = layout.heap.bytes_by_name()
    reserved.pop("heap/layout")
    ledger = memory_ledger(shapes, blocks_of(shapes), ranks=world, settings=settings, on_device=False)
    assert sum(ledger.heap.values()) + ledger.host == sum(reserved.values())
    held = {"parameters": 0, "gradients": 0, "moments": 0}
    for parameter in model.parameters():
        held["parameters"] += cast(DTensor, parameter).to_local().nbytes
        held["gradients"] += cast(DTensor, parameter.grad).to_local().nbytes
        state = optimizer.state[parameter]
        held["moments"] += sum(cast(DTensor, state[name]).to_local().nbytes for name in ("exp_avg", "exp_avg_sq"))
    if rank == 0:
        assert ledger.fsdp2 == held


def _size(request: tuple[str, int]) -> tuple[str, int]:
    """By kind: a root lists its own unit first, the ledger last."""
    name, nbytes = request
    return name.split("/")[0], nbytes


def qwen(name: str, ranks: int = 8, hosts: int = 1, **settings: Any) -> MemoryLedger:
    pytest.importorskip("transformers")
    model = model_of(MODELS[name])
    return memory_ledger(model, blocks_of(model), ranks=ranks, hosts=hosts, settings=Settings(**settings))


def test_seven_billion_parameters_on_eight_ranks() -> None:
    ledger = qwen("qwen2.5-7b")
    assert ledger.fsdp2["parameters"] == pytest.approx(7.616e9 * 4 / 8, rel=1e-3)
    assert ledger.heap["staging"] <= 1.0e9
    assert ledger.share <= 0.45
    assert ledger.host < 16 << 20, "words are not the device's"
    views = qwen("qwen2.5-7b", gradient_views=True)
    assert views.heap == ledger.heap and views.share <= 0.20


@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_staging_is_bounded_however_many_ranks_share_a_host(ranks: int) -> None:
    assert qwen("qwen2.5-32b", ranks).heap["staging"] <= 1.0e9


def test_over_hosts_the_regions_are_those_of_a_mesh_over_hosts() -> None:
    pytest.importorskip("transformers")
    model = model_of(TINY)
    found = regions_of(model, blocks_of(model), 8, 4, Settings(), on_device=True)
    grid = RankGrid(tuple(range(8)), 8, 0, (0, 0, 1, 1, 2, 2, 3, 3))
    assert found.requests() == Regions(grid, found.units, Settings(), True).requests()
    assert {"cache", "sums"} <= found.ledger().keys()


@pytest.mark.parametrize("tied", [True, False])
def test_int8_sums_are_those_of_the_projections(tied: bool) -> None:
    pytest.importorskip("transformers")
    model = model_of(TINY | {"tie_word_embeddings": tied})
    settings = Settings(sums_dtype="int8")
    found = regions_of(model, blocks_of(model), 4, 2, settings, on_device=False)
    coarse = {
        spec.name.removesuffix(".weight").rpartition(".")[2]
        for unit in found.units
        for spec in unit.params
        if spec.coarse
    }
    assert coarse == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    plain = regions_of(model, blocks_of(model), 4, 2, Settings(), on_device=False)
    assert not any(spec.coarse for unit in plain.units for spec in unit.params)
    sums = [one.ledger()["sums"] for one in (plain, found)]
    assert 1.25 < sums[1] / sums[0] < 1.4, "8 bytes an element, and 10.1 to 12"


def test_what_is_frozen_has_no_gradient() -> None:
    pytest.importorskip("transformers")
    model = model_of(TINY)
    before = memory_ledger(model, blocks_of(model), ranks=4)
    model.requires_grad_(False)
    blocks_of(model)[0].requires_grad_(True)
    after = memory_ledger(model, blocks_of(model), ranks=4)
    assert after.fsdp2["parameters"] == before.fsdp2["parameters"]
    assert after.fsdp2["moments"] == 2 * after.fsdp2["gradients"] < before.fsdp2["moments"]
    assert after.heap["accumulator"] < before.heap["accumulator"]


def test_what_cannot_be_computed() -> None:
    pytest.importorskip("transformers")
    model = model_of(TINY)
    with pytest.raises(ConfigError, match="8 ranks cannot be divided evenly over 3 hosts"):
        memory_ledger(model, blocks_of(model), ranks=8, hosts=3)
    with pytest.raises(ConfigError, match="^model: no causal language model"):
        model_of({"model_type": "no such"})


@pytest.mark.parametrize(("ranks", "hosts"), [(8, 1), (64, 8)])
def test_the_page_has_the_table_that_the_command_prints(ranks: int, hosts: int) -> None:
    pytest.importorskip("transformers")
    console, models = pytest.importorskip("rich.console"), ("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-32b")
    printed = io.StringIO()
    console.Console(file=printed, width=80).print(ledger_table({name: MODELS[name] for name in models}, ranks, hosts))
    table = textwrap.dedent("\n".join(line.rstrip() for line in printed.getvalue().splitlines() if line.strip()))
    assert table in (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8"), table


def test_a_small_model_is_shown_in_megabytes() -> None:
    pytest.importorskip("transformers")
    console, printed = pytest.importorskip("rich.console"), io.StringIO()
    console.Console(file=printed, width=80).print(ledger_table({"tiny": TINY}, 4, 1))
    assert "MB a GPU, 4 ranks on one host" in printed.getvalue()
    assert re.search(r"odc adds +0\.\d*[1-9]|odc adds +[1-9]", printed.getvalue()), printed.getvalue()
