from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from odc.errors import UnfinishedMinibatchError
from odc.fsdp import hooks
from odc.protocol import RootState


@dataclass
class Minibatch:
    """Stands in for a root's state machine."""

    state: RootState
    refuses: bool = False
    stepped: int = 0
    asked: list[str] = field(default_factory=list)

    @property
    def may_step(self) -> bool:
        return self.state is RootState.CLOSED

    def before_step(self) -> None:
        self.stepped += 1
        if self.refuses:
            raise UnfinishedMinibatchError("not now")

    def refuse_unfinished(self, doing: str) -> None:
        self.asked.append(doing)
        if self.refuses:
            raise UnfinishedMinibatchError("not now")


@dataclass
class Root:
    """Stands in for a root that holds some parameters."""

    minibatch: Minibatch
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    steps: int = 0

    @property
    def member(self) -> Any:
        return SimpleNamespace(protocol=self)

    def note_step(self) -> None:
        self.steps += 1

    def holds_any(self, ids: set[int]) -> bool:
        return any(id(parameter) in ids for parameter in self.parameters)


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> list[Root]:
    found: list[Root] = []
    monkeypatch.setattr(hooks, "live_roots", lambda: found)
    hooks.guard_steps()
    return found


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    return made


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("state", [RootState.OPEN, RootState.FINISHING])
def test_a_step_in_an_unfinished_minibatch_raises_before_it_changes_anything(
    roots: list[Root], state: RootState, kind: Any
) -> None:
    weight, unsharded = parameter(), parameter()
    roots.append(Root(Minibatch(state, refuses=True), [parameter(), weight]))
    with pytest.raises(UnfinishedMinibatchError):
        kind([{"params": [unsharded]}, {"params": [weight], "lr": 0.1}], lr=0.1).step()
    assert weight.tolist() == unsharded.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("state", [RootState.OPEN, RootState.CLOSED])
def test_an_epoch_of_evaluation_is_closed_by_the_step(roots: list[Root], state: RootState) -> None:
    weight = parameter()
    roots.append(Root(Minibatch(state), [weight]))
    torch.optim.SGD([weight], lr=0.5).step()
    assert roots[0].minibatch.stepped == (state is RootState.OPEN)
    assert weight.tolist() == [0.5, 0.5]


def test_other_optimizers_and_other_roots_are_left_alone(roots: list[Root]) -> None:
    mine, other, unsharded = parameter(), parameter(), parameter()
    roots += [Root(Minibatch(RootState.OPEN, refuses=True), [mine]), Root(Minibatch(RootState.OPEN), [other])]
    torch.optim.AdamW([unsharded]).step()
    assert [root.minibatch.stepped for root in roots] == [0, 0]
    torch.optim.AdamW([unsharded, other]).step()
    assert [root.minibatch.stepped for root in roots] == [0, 1]
    assert [root.steps for root in roots] == [0, 1]


def test_a_step_is_noted_where_it_changes_something(roots: list[Root]) -> None:
    """After an abandoned minibatch no parameter has a gradient, on the rank that abandoned it as well."""
    weight = parameter()
    roots.append(Root(Minibatch(RootState.OPEN, refuses=True), [weight]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with pytest.raises(UnfinishedMinibatchError):
        optimizer.step()
    roots[0].minibatch.state = RootState.CLOSED
    optimizer.step()
    assert roots[0].steps == 1
    optimizer.zero_grad()
    optimizer.step()
    assert roots[0].steps == 1


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_])
def test_clipping_in_an_unfinished_minibatch_raises_before_it_changes_anything(roots: list[Root], clip: Any) -> None:
    """However the parameters come, and though the function was imported before odc knew of any model."""
    mine, other = parameter(), parameter()
    roots += [
        Root(Minibatch(RootState.OPEN, refuses=True), [mine]),
        Root(Minibatch(RootState.CLOSED, refuses=True), [other]),
    ]
    for parameters in ([other, mine], (p for p in (other, mine)), mine):
        with pytest.raises(UnfinishedMinibatchError):
            clip(parameters, 0.5)
    assert mine.grad is not None and mine.grad.tolist() == [1.0, 1.0]
    clip((p for p in (other,)), 0.5)
    assert other.grad is not None and max(other.grad.tolist()) <= 0.5, "a finished one is clipped"
    assert roots[0].minibatch.asked == [f"{clip.__name__}()"] * 3 and not roots[1].minibatch.asked


def test_an_empty_generator_still_warns(roots: list[Root]) -> None:
    with pytest.warns(UserWarning, match="empty generator"):
        assert torch.nn.utils.clip_grad_norm_((p for p in ()), 1.0) == 0


def test_the_hooks_are_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[Any] = []
    monkeypatch.setattr(hooks, "register_optimizer_step_pre_hook", installed.append)
    monkeypatch.setattr(hooks._torch_clip, "install", installed.append)
    monkeypatch.setattr(hooks, "_guarding", False)
    hooks.guard_steps()
    hooks.guard_steps()
    assert [hook.__wrapped__ for hook in installed] == [hooks._before_step, hooks._before_clip]  # not to be compiled


@pytest.mark.parametrize("name", ["minibatch", "set_is_last_backward", "weigth"])
def test_a_method_of_a_root_that_was_forgotten_names_the_cure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "excepthook", lambda _, error, __: shown.extend(traceback.format_exception_only(error)))
    hooks._install_hooks()
    with pytest.raises(AttributeError) as caught:
        getattr(nn.Linear(2, 2), name)
    sys.excepthook(caught.type, caught.value, caught.tb)
    cure = ["This Linear is not sharded by odc: call odc.fully_shard on it too, last, after its layers\n"]
    assert shown[1:] == (cure if name != "weigth" else [])
