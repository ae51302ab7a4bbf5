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
    """Ranks of one mesh agree on the number whatever else each of them has sharded."""
    modules = [nn.Linear(1, 1) for _ in range(4)]
    for module, ranks in zip(modules, [RANKS, OTHERS, RANKS, OTHERS], strict=True):
        register([module], ranks, 1001, None)
    assert [registered(module).sequence for module in modules] == [0, 0, 1, 1]


def test_the_order_of_ranks_does_not_make_another_mesh() -> None:
    """Two roots on the same ranks would have one name, as torch sorts them."""
    modules = [nn.Linear(1, 1) for _ in range(2)]
    for module, ranks in zip(modules, [RANKS, RANKS[::-1]], strict=True):
        register([module], ranks, 1001, None)
    assert [registered(module).sequence for module in modules] == [0, 1]


def test_modules_of_one_call_share_its_number() -> None:
    pair, after = [nn.Linear(1, 1), nn.Linear(1, 1)], nn.Linear(1, 1)
    settings = Settings(prefetch=2)
    register(pair, RANKS, 1003, settings)
    register([after], RANKS, 1003, None)
    assert registered(pair[0]) is registered(pair[1])
    assert registered(pair[0]) == ShardCall(0, 1003, settings)
    assert registered(after) == ShardCall(1, 1003, None)


def test_a_deleted_module_takes_its_entry_along() -> None:
    before = len(sharded_modules())
    module = nn.Linear(1, 1)
    register([module], RANKS, 1001, None)
    assert module in sharded_modules()
    del module
    gc.collect()
    assert len(sharded_modules()) == before


def test_a_number_is_not_used_again_after_its_module_is_gone() -> None:
    """Else a new heap could be taken for an old one on a rank that is slow to let go."""
    register([nn.Linear(1, 1)], RANKS, 1001, None)
    gc.collect()
    module = nn.Linear(1, 1)
    register([module], RANKS, 1001, None)
    assert registered(module).sequence == 1


def test_nothing_shows_on_the_module() -> None:
    module = nn.Linear(2, 2)
    names, state, before = dir(module), list(module.state_dict()), pickle.dumps(module)
    register([module], RANKS, 1001, None)
    assert dir(module) == names
    assert list(module.state_dict()) == state
    assert pickle.dumps(module) == before


def test_what_was_not_sharded_is_not_registered() -> None:
    with pytest.raises(KeyError):
        registered(nn.Linear(1, 1))
