"""Bad input: each is a clear error at the cause, before any work starts; and the smallest worlds work."""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import assert_same
from support.models import Case, build, low_precision_policy, make, next_token_loss, shard, tokens, train
from support.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc import OdcError, Settings, fully_shard, minibatch
from odc.errors import LayoutMismatchError, UnsupportedError

PLAIN = Case(counts=((1, 1),))
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = {}


def refused(kind: type[Exception], *words: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """The function, run on both ranks, must raise `kind` with all of `words` in the message."""

    def note(function: Callable[[], object]) -> Callable[[], object]:
        REFUSED[function.__name__] = (function, kind, words)
        return function

    return note


def run_once(model: Any) -> None:
    x = tokens(0, 0, 0)
    next_token_loss(model(x), x).backward()


@refused(UnsupportedError, "3-D mesh", "(shard,)")
def three_mesh_dimensions() -> object:
    return fully_shard(make(PLAIN), mesh=init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c")))


@refused(TypeError, "settings must be odc.Settings(...), not dict {'timeout_s': 5.0}")
def settings_as_a_dict() -> object:
    return fully_shard(make(PLAIN), settings={"timeout_s": 5.0})  # type: ignore[arg-type]


@refused(UnsupportedError, "weight is torch.complex64: train view_as_real of it")
def a_complex_parameter() -> object:
    return fully_shard(nn.Linear(4, 4, dtype=torch.complex64))


@refused(UnsupportedError, "'weight' was sharded already, with the FSDPSequential around it", "on the root last")
def root_before_its_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    fully_shard(model[0])


@refused(UnsupportedError, "this Sequential is not sharded by odc: call odc.fully_shard on it too, last")
def minibatch_of_a_plain_root() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    with minibatch(model):  # type: ignore[arg-type]
        pass


@refused(UnsupportedError, "2-D mesh", "names")
def unnamed_mesh_dimensions() -> object:
    return fully_shard(make(PLAIN), mesh=init_device_mesh("cpu", (1, 2)))


@refused(UnsupportedError, "CPUOffloadPolicy")
def offloading() -> object:
    return fully_shard(make(PLAIN), offload_policy=CPUOffloadPolicy())


@refused(UnsupportedError, "mixed dtypes", "layers.0.out.weight", "bfloat16", "float32")
def mixed_dtypes_in_a_unit() -> object:
    model = make(PLAIN)
    model.layers[0].out.to(torch.bfloat16)
    return fully_shard(model)


@refused(UnsupportedError, "layers.1", "mesh")
def units_on_different_meshes() -> None:
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    model = make(PLAIN)
    for i, layer in enumerate(model.layers):
        fully_shard(layer, mesh=grid["inner"] if i == 1 else grid["outer"])
    run_once(fully_shard(model, mesh=grid["outer"]))


@refused(UnsupportedError, "layers.1", "torch")
def unit_sharded_by_torch() -> None:
    mesh, model = init_device_mesh("cpu", (2,)), make(PLAIN)
    for i, layer in enumerate(model.layers):
        (torch_fully_shard if i == 1 else fully_shard)(layer, mesh=mesh)
    run_once(fully_shard(model, mesh=mesh))


@refused(OdcError, "torch")
def root_sharded_by_torch() -> None:
    mesh, model = init_device_mesh("cpu", (2,)), make(PLAIN)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    run_once(torch_fully_shard(model, mesh=mesh))


@refused(ValueError, "layers.2", "settings", "prefetch=3")
def conflicting_settings() -> None:
    model = make(PLAIN)
    for i, layer in enumerate(model.layers):
        fully_shard(layer, settings=Settings(prefetch=3) if i == 2 else None)
    run_once(fully_shard(model, settings=Settings(prefetch=0)))


@refused(UnsupportedError, "without parameters")
def nothing_to_shard() -> None:
    fully_shard(nn.Sequential(nn.ReLU())).finish_minibatch()


class AbstractFirst(ABC, nn.Linear):
    """Python refuses to put a class in front of such a one."""


class Derived(AbstractFirst):
    """Its base class is the one to change."""


@refused(UnsupportedError, "class AbstractFirst", "behind nn.Module", "(nn.Module, ABC)")
def a_class_that_begins_with_abc() -> None:
    fully_shard([nn.Linear(4, 4), Derived(4, 4)])


@refused(UnsupportedError, "complex64")
def complex_parameters() -> None:
    model = fully_shard(nn.Linear(4, 4, dtype=torch.complex64))
    model(torch.ones(1, 4, dtype=torch.complex64)).abs().sum().backward()


@on_ranks(2)
def test_a_tree_without_parameters_runs_as_under_torch(rank: int, world: int) -> None:
    model = fully_shard(nn.Sequential(nn.ReLU()))
    assert model(-torch.ones(2)).tolist() == [0.0, 0.0]  # type: ignore[operator]


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_refused(rank: int, world: int, name: str) -> None:
    function, kind, words = REFUSED[name]
    with pytest.raises(kind) as caught:
        function()
    for word in words:
        assert word in str(caught.value), caught.value


def test_without_a_process_group() -> None:
    with pytest.raises(UnsupportedError, match="start the program by torchrun .*init_process_group"):
        fully_shard(nn.Linear(2, 2))


# other layouts on other ranks ------------------------------------------------------------------------------------


def _narrower(rank: int) -> Any:
    return build_wide(33 if rank == 0 else 30)


def build_wide(width: int) -> Any:
    return shard(fully_shard, make(PLAIN, width=width), PLAIN, init_device_mesh("cpu", (2,)))


def _one_unit_less(rank: int) -> Any:
    mesh, model = init_device_mesh("cpu", (2,)), make(PLAIN)
    for layer in model.layers:
        # The same number of calls, so that the roots' heaps bear the same name.
        fully_shard(nn.Linear(2, 2) if rank == 1 and layer is model.layers[2] else layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _other_dtype(rank: int) -> Any:
    options = {"mp_policy": low_precision_policy()} if rank == 1 else {}
    return shard(fully_shard, make(PLAIN), PLAIN, init_device_mesh("cpu", (2,)), **options)


def _other_settings(rank: int) -> Any:
    return build(fully_shard, PLAIN, init_device_mesh("cpu", (2,)), settings=Settings(reproducible=rank == 1))


def _one_frozen(rank: int) -> Any:
    model = make(PLAIN)
    model.layers[1].out.weight.requires_grad_(rank == 0)
    return shard(fully_shard, model, PLAIN, init_device_mesh("cpu", (2,)))


LAYOUTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "narrower": (_narrower, "unit"),
    "one_unit_less": (_one_unit_less, "units"),
    "other_dtype": (_other_dtype, "unit"),
    "other_settings": (_other_settings, "settings"),
    "one_frozen": (_one_frozen, "rank 1 has layers.1.out.weight (561 elements a rank, float32, frozen)"),
}


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(2)
def test_layouts_that_differ_between_ranks(rank: int, world: int, name: str) -> None:
    make_model, difference = LAYOUTS[name]
    model = make_model(rank)
    with pytest.raises(LayoutMismatchError) as caught:
        run_once(model)
    for word in ("rank 0", "rank 1", difference):
        assert word in str(caught.value), caught.value


# small worlds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", ["server", "direct"])
@pytest.mark.parametrize("low_precision", [False, True], ids=["fp32", "bf16"])
@on_ranks(1)
def test_world_of_one(rank: int, world: int, accumulate: Any, low_precision: bool) -> None:
    for case in (Case(counts=((1,),)), Case(counts=((3,), (0,), (2,)), idiom="minibatch")):
        case = dataclasses.replace(case, low_precision=low_precision)
        run = train(fully_shard, case, rank, world, settings=Settings(accumulate=accumulate))
        assert_same(run, train(torch_fully_shard, case, rank, world, pad=case.idiom != "each"))


@pytest.mark.parametrize("accumulate", ["server", "direct"])
@on_ranks(2)
def test_replicas_without_shards(rank: int, world: int, accumulate: Any) -> None:
    """A hybrid mesh whose shard dimension has one rank: nothing to fetch, replicas to add up."""
    case = Case(counts=((1, 2), (0, 1)), idiom="minibatch")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    run = train(fully_shard, case, rank, world, mesh=mesh, settings=Settings(accumulate=accumulate))
    assert_same(run, train(torch_fully_shard, case, rank, world, mesh=mesh, pad=True))
