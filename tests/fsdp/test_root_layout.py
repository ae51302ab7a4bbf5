"""Calls of `fully_shard` are numbered by mesh, and leave nothing on the modules."""

from __future__ import annotations

import gc
import pickle

import pytest
from torch import nn

from odc.fsdp import root_layout
from odc.fsdp.root_layout import ShardCall, register, registered, sharded_modules
from odc.settings import Settings

RANKS, OTHERS = (1001, 1003), (1001, 1005)  # meshes that no other test uses


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_layout, "_calls", type(root_layout._calls)())


def test_calls_are_numbered_by_mesh() -> None:
    """Ranks of one mesh, in whatever order, agree on the number whatever else each of them has sharded."""
    modules = [[nn.Linear(1, 1)], [nn.Linear(1, 1)], [nn.Linear(1, 1), nn.Linear(1, 1)], [nn.Linear(1, 1)]]
    settings = Settings(prefetch=2)
    for some, ranks in zip(modules, [RANKS, OTHERS, RANKS[::-1], OTHERS], strict=True):
        register(some, ranks, settings)
    assert [registered(some[0]) for some in modules] == [ShardCall(number, settings) for number in (0, 0, 1, 1)]
    assert registered(modules[2][0]) is registered(modules[2][1])
    with pytest.raises(KeyError):
        registered(nn.Linear(1, 1))


def test_a_deleted_module_takes_its_entry_along_and_not_its_number() -> None:
    """Else a new heap could be taken for an old one on a rank that is slow to give it back."""
    before = len(sharded_modules())
    for number in range(2):
        module = nn.Linear(1, 1)
        register([module], RANKS, None)
        assert registered(module).sequence == number
        assert module in sharded_modules()
        del module
        gc.collect()
        assert len(sharded_modules()) == before


def test_nothing_shows_on_the_module() -> None:
    module = nn.Linear(2, 2)
    names, state, before = dir(module), list(module.state_dict()), pickle.dumps(module)
    register([module], RANKS, None)
    assert (dir(module), list(module.state_dict()), pickle.dumps(module)) == (names, state, before)
