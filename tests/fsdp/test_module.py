from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from odc.errors import OdcError, UnsupportedError
from odc.fsdp import boundaries
from odc.fsdp.minibatch import OpenEpoch
from odc.fsdp.module import OdcModule, add_methods, minibatch


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


NEW = {"minibatch", "finish_minibatch", "publish", "abandon_minibatch"}
REDEFINED = {name for name in vars(OdcModule) if not name.startswith("_")} - NEW


# the surface ---------------------------------------------------------------------------------------------------------


def test_whatever_is_redefined_takes_what_torchs_takes() -> None:
    """A call that is right for the installed torch never fails for its arguments."""
    for name in REDEFINED & public(FSDPModule):
        theirs = inspect.signature(getattr(FSDPModule, name)).parameters
        ours = inspect.signature(getattr(OdcModule, name)).parameters
        takes_any = {p.kind for p in ours.values()} >= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        same = [(p.name, p.kind, p.default) for p in theirs.values()] == [
            (p.name, p.kind, p.default) for p in ours.values()
        ]
        same_count = [p.kind for p in theirs.values()] == [p.kind for p in ours.values()]
        assert takes_any or same or same_count, f"{name}: {theirs} against {ours}"


def call(name: str) -> Any:
    """Call a method as torch's signature asks, on nothing at all."""
    method = getattr(OdcModule, name)
    needed = [
        p
        for p in inspect.signature(method).parameters.values()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    return method(*[None] * len(needed))


@pytest.mark.parametrize("name", sorted(n for n in REDEFINED if "Refused" in (getattr(OdcModule, n).__doc__ or "")))
def test_what_is_refused_says_what_and_why(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name} has no meaning under on-demand communication: ."):
        call(name)


def test_gradient_sync_of_one_module_alone_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="^set_requires_gradient_sync.recurse=False. has no meaning"):
        OdcModule.set_requires_gradient_sync(None, False, recurse=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(n for n in REDEFINED if "No-op" in (getattr(OdcModule, n).__doc__ or "")))
def test_what_has_no_effect_may_be_called(name: str) -> None:
    assert call(name) is None


def test_everything_else_is_torchs() -> None:
    for name in public(FSDPModule) - REDEFINED:
        assert getattr(OdcModule, name) is getattr(FSDPModule, name)


def test_nothing_of_torch_is_hidden() -> None:
    assert public(OdcModule) == public(FSDPModule) | NEW | REDEFINED
    assert not NEW & public(FSDPModule), "torch has a method of that name by now"


# the class -----------------------------------------------------------------------------------------------------------


class Block(nn.Linear):
    """Some user's module."""


def as_torch_does(module: nn.Module) -> nn.Module:
    """What torch's `fully_shard` does to a module's class."""
    cls = type(module)
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return module


def test_the_class_keeps_its_name_place_and_bases() -> None:
    block = as_torch_does(Block(2, 2))
    add_methods(block)
    cls = type(block)
    add_methods(block)
    assert type(block) is cls, "twice is once"
    assert type(block).__name__ == "FSDPBlock"
    assert type(block).__module__ == type(block).__mro__[2].__module__
    assert isinstance(block, OdcModule) and isinstance(block, FSDPModule) and isinstance(block, Block)


def test_a_class_that_registers_its_subclasses_sees_torchs_only() -> None:
    found: list[type] = []

    class Registered(nn.Linear):
        def __init_subclass__(cls, **options: Any) -> None:
            found.append(cls)
            super().__init_subclass__(**options)

    module = as_torch_does(Registered(2, 2))
    torchs = type(module)
    add_methods(module)
    type("Mine", (type(module),), {})
    assert [cls.__name__ for cls in found] == ["FSDPRegistered", "Mine"] and found[0] is torchs


def test_a_slice_of_a_sharded_list_is_a_plain_list() -> None:
    """For a slice torch constructs the class of the list; nothing sharded must come out."""
    layers: Any = as_torch_does(nn.ModuleList(nn.Linear(1, 1) for _ in range(3)))
    add_methods(layers)
    tail = layers[1:]
    assert type(tail) is nn.ModuleList
    assert list(tail) == [layers[1], layers[2]]


# minibatch() ---------------------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """Stands in for one root's state machine, writing down its calls."""

    name: str
    calls: list[str]
    fails_in: str = ""
    explicit: bool = False
    current: OpenEpoch = field(default_factory=OpenEpoch)

    def flush(self) -> None:
        """No backward and no push of these tests fails."""

    def note(self, what: str) -> None:
        self.calls.append(f"{self.name}.{what}")
        if self.fails_in == what:
            raise (KeyboardInterrupt if what == "body" else ValueError)(f"{what} fails")

    def begin(self) -> None:
        self.note("begin")

    def done(self) -> None:
        self.note("done")

    def collect(self) -> None:
        self.note("collect")

    def abort(self, error: BaseException) -> None:
        self.calls.append(f"{self.name}.abort({error})")


@dataclass
class Model:
    """Stands in for a sharded module and its root."""

    minibatch: Machine
    rank: int = 3
    last: list[bool] = field(default_factory=lambda: [True])

    def set_is_last_backward(self, last: bool) -> None:
        self.last.append(last)

    def map_peers(self) -> None:
        assert self.minibatch.explicit, "it is open by then, so an error aborts it"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(boundaries, "root_of", lambda model: model)
    return []


def models(calls: list[str], **fails_in: str) -> list[Any]:
    return [Model(Machine(name, calls, fails_in.get(name, ""))) for name in ("a", "b")]


def test_every_root_is_done_before_any_is_collected(calls: list[str]) -> None:
    """Ranks may finish their roots in different orders: a rank that waits must have done all that others wait for."""
    roots = models(calls)
    with minibatch(*roots):
        assert [root.last[-1] for root in roots] == [False, False], "no backward inside ends the minibatch"
        assert all(root.minibatch.explicit for root in roots)
        calls.append("body")
    assert calls == ["a.begin", "b.begin", "body", "a.done", "b.done", "a.collect", "b.collect"]
    assert [root.last[-1] for root in roots] == [True, True]
    assert not any(root.minibatch.explicit for root in roots)


@pytest.mark.parametrize("where", ["body", "begin", "done", "collect"])
def test_an_error_anywhere_aborts_every_root_and_comes_out(calls: list[str], where: str) -> None:
    roots = models(calls, b=where)
    with pytest.raises((ValueError, KeyboardInterrupt), match=f"{where} fails"), minibatch(*roots):
        roots[1].minibatch.note("body")
    assert calls[-2:] == [f"a.abort({where} fails)", f"b.abort({where} fails)"]
    assert [root.last[-1] for root in roots] == [True, True]
    assert not any(root.minibatch.explicit for root in roots)


def test_a_root_that_is_in_a_minibatch_already_is_refused_and_the_others_stay_as_they_were(calls: list[str]) -> None:
    a, b = models(calls)
    with minibatch(b):
        with pytest.raises(OdcError, match=r"rank 3: minibatch\(\) inside minibatch\(\)"), minibatch(a, b):
            calls.append("never")
        assert a.last[-1], "a backward of the other root must still end its minibatch"
        assert not b.last[-1] and b.minibatch.explicit, "the outer minibatch goes on"
    assert calls == ["b.begin", "b.done", "b.collect"]


def test_the_same_root_twice_is_refused(calls: list[str]) -> None:
    a, _ = models(calls)
    with pytest.raises(OdcError, match="twice"), minibatch(a, a):
        calls.append("never")
    assert calls == []
    assert a.last[-1]
