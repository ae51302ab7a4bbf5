"""A training state goes back into the same objects, or into new ones, and training goes on with the same bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from odc import fully_shard
from odc.errors import ConfigError, UnsupportedError
from odc.recovery.state import TrainingState

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adam with a learning rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), capturable=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


class Trained:
    """A model with buffers and dropout, an optimizer and a schedule."""

    def __init__(self, make: Make, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = make(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state = TrainingState([self.model], [self.optimizer], {"schedule": self.schedule})

    def step(self) -> None:
        x = torch.randn(5, 6) + random.random() + float(np.random.rand())

        def loss() -> torch.Tensor:
            self.optimizer.zero_grad()
            found: torch.Tensor = self.model(x).square().sum()
            found.backward()
            return found

        self.optimizer.step(loss)  # type: ignore[arg-type]
        self.schedule.step()

    def weights(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.model.state_dict().values()]

    def take(self) -> tuple[list[torch.Tensor], bytes]:
        tensors, text = self.state.take()
        return [tensor.clone() for tensor in tensors], text


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same objects", "new objects"])
def test_training_goes_on_with_the_same_bits(make: Make, elsewhere: bool) -> None:
    one = Trained(make)
    for _ in range(3):
        one.step()
    kept = one.take()
    for _ in range(3):
        one.step()
    after = one.weights()
    other = Trained(make, seed=9) if elsewhere else one
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    other.state.put(*kept)
    assert all(parameter.grad is None for parameter in other.model.parameters())
    for _ in range(3):
        other.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other.weights(), after, strict=True))


def test_optimizer_state_that_came_later_goes() -> None:
    one = Trained(OPTIMIZERS["adamw"])
    kept = one.take()
    one.step()
    one.state.put(*kept)
    assert not one.optimizer.state


class CountingInGroups(torch.optim.SGD):
    """Counts its steps in its groups, as timm's Lamb does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


def test_entries_of_parameter_groups_that_came_later_go() -> None:
    one = Trained(lambda p: CountingInGroups(p, lr=0.1))
    kept, (group,) = one.take(), one.optimizer.param_groups
    one.step()
    one.state.put(*kept)
    assert "step" not in group and group["initial_lr"] == 0.1
    one.step()
    assert group["step"] == 1


def test_a_learning_rate_in_a_tensor_stays_that_tensor() -> None:
    one = Trained(OPTIMIZERS["adam with a learning rate in a tensor"])
    rate = one.optimizer.param_groups[0]["lr"]
    kept = one.take()
    one.step()
    changed = float(rate)
    one.state.put(*kept)
    assert one.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) > changed


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same objects", "new objects"])
def test_modes_and_frozen_parameters_are_put_back(elsewhere: bool) -> None:
    """A rank that is lost in an evaluation leaves the others in its mode."""
    one = Trained(OPTIMIZERS["sgd"])
    one.model[1].eval()
    one.model[0].requires_grad_(False)
    kept = one.take()
    one.model.eval().requires_grad_(True)
    other = Trained(OPTIMIZERS["sgd"]) if elsewhere else one
    other.state.put(*kept)
    assert other.model.training
    assert [module.training for module in other.model] == [True, False, True, True]
    assert [parameter.requires_grad for parameter in other.model.parameters()] == [False] * 2 + [True] * 4


def test_the_first_attempts_modes_are_those_of_its_beginning() -> None:
    """A model is often switched to training, and parts of it frozen, between `protect` and the loop."""
    one = Trained(OPTIMIZERS["sgd"])
    one.model.eval()
    kept = one.take()
    one.model.train()
    one.model[0].requires_grad_(False)
    one.state.begin()
    one.model.eval()
    one.state.begin()  # of a later attempt
    one.state.put(*kept, first=True)
    assert all(module.training for module in one.model.modules())
    assert [parameter.requires_grad for parameter in one.model.parameters()] == [False] * 2 + [True] * 4
    one.state.put(*kept)
    assert not one.model.training, "a later step's modes are those that were kept"


def test_a_buffer_that_an_interrupted_forward_computed_is_put_back() -> None:
    one = Trained(OPTIMIZERS["sgd"])
    one.model.register_buffer("memory", torch.zeros(2))
    kept = one.take()
    one.model.memory = torch.ones(2, requires_grad=True) * 3
    one.state.put(*kept)
    assert one.model.memory.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same objects", "new objects"])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_buffer_that_a_forward_has_replaced_by_a_larger_one_gets_its_shape_back(
    before: int, after: int, elsewhere: bool
) -> None:
    """As sinusoidal positions for a longer sample; a new process has the first ones, whichever were kept."""
    one = Trained(OPTIMIZERS["sgd"])
    one.model[0].register_buffer("positions", torch.arange(float(before)))
    kept = one.take()
    other = Trained(OPTIMIZERS["sgd"], seed=9) if elsewhere else one
    other.model[0].register_buffer("positions", torch.zeros(after))
    other.state.put(*kept)
    for tensor in kept[0]:
        tensor.zero_()  # what is kept stays apart
    assert other.model[0].get_buffer("positions").tolist() == list(range(before))


@pytest.mark.parametrize("names", [("first", "second"), ("second", "first")])
def test_two_buffers_that_were_apart_are_apart_again(names: tuple[str, str]) -> None:
    """As of rotary embeddings whose frequencies an interrupted forward has set back to the original ones."""
    one = Trained(OPTIMIZERS["sgd"])
    for number, name in enumerate(names):
        one.model.register_buffer(name, torch.full((2,), float(number)))
    kept = one.take()
    one.model.first = one.model.second
    for _ in range(2):
        one.state.put(*kept)
        assert [one.model.get_buffer(name).tolist() for name in names] == [[0.0, 0.0], [1.0, 1.0]]


def test_a_buffer_whose_elements_are_one_is_put_back() -> None:
    one = Trained(OPTIMIZERS["sgd"])
    mask = torch.ones(1).expand(3)
    one.model.register_buffer("mask", mask)
    kept = one.take()
    one.state.put(*kept)
    assert one.model.mask is mask
    one.model.mask = torch.zeros(1).expand(3)
    one.state.put(*kept)
    assert one.model.mask.tolist() == [1.0, 1.0, 1.0]


def test_a_buffer_of_another_dtype_is_refused() -> None:
    one = Trained(OPTIMIZERS["sgd"])
    one.model[0].register_buffer("positions", torch.zeros(2))
    kept = one.take()
    one.model[0].register_buffer("positions", torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"0\.positions: torch\.float64 here, 0\.positions: torch\.float32 there"):
        one.state.put(*kept)


@pytest.mark.parametrize("kept_as_one", [False, True])
def test_a_forward_may_make_two_buffers_one_tensor(kept_as_one: bool) -> None:
    """As some rotary embeddings do: `register_buffer("inv_freq", self.original_inv_freq)`."""
    one = Trained(OPTIMIZERS["sgd"])
    for name in ("first", "second"):
        one.model.register_buffer(name, torch.full((2,), 3.0))
    two = copy.deepcopy(one.model)
    other = TrainingState([two], [torch.optim.SGD(two.parameters(), lr=0.1)], one.state.others)
    (one.model if kept_as_one else two).second = (one.model if kept_as_one else two).first
    kept = one.take()
    two.first.zero_()
    other.put(*kept)
    assert two.first.tolist() == two.second.tolist() == [3.0, 3.0]


def test_a_tensor_that_is_more_than_its_numbers_is_refused() -> None:
    """An optimizer's state of 8 bits would come back as one of 32."""

    class EightBits(torch.Tensor):
        pass

    one = Trained(OPTIMIZERS["sgd"])
    one.optimizer.state[next(one.model.parameters())]["moment"] = torch.zeros(2).as_subclass(EightBits)
    with pytest.raises(UnsupportedError, match="states of plain tensors, and one is a EightBits"):
        one.take()


def test_other_parameter_groups_are_refused_and_nothing_is_changed() -> None:
    kept, other = Trained(OPTIMIZERS["sgd"]).take(), Trained(OPTIMIZERS["sgd"], seed=1)
    before = other.weights()
    other.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigError, match=r"kept state has 1 parameter groups of SGD, this process 2: add all of them"):
        other.state.put(*kept)
    assert all(torch.equal(mine, old) for mine, old in zip(other.weights(), before, strict=True))


class Counting(torch.optim.SGD):
    """Counts its steps in an entry of its state that is no parameter's, as MADGRAD does."""

    def step(self, closure: Any = None) -> Any:
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0])  # type: ignore[index]
        self.state["k"] += 1  # type: ignore[index]
        return super().step(closure)


def test_optimizer_state_that_is_no_parameters_is_kept() -> None:
    one = Trained(lambda p: Counting(p, lr=0.1, momentum=0.9))
    one.step()
    kept = one.take()
    one.step()
    one.state.put(*kept)
    assert int(one.optimizer.state["k"]) == 1  # type: ignore[index,call-overload]
    one.state.refuse_undivided()


class Sam(torch.optim.Optimizer):
    """Has an optimizer with moments, and a state of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=0.1)


class Prepared(torch.optim.Optimizer):
    """As accelerate's: all that it has is another's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state: Any = property(lambda self: self.optimizer.state)
    param_groups: Any = property(lambda self: self.optimizer.param_groups)


class Several(torch.optim.SGD):
    """Has one optimizer for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__([*parameters], lr=0.1)
        self.each = {p: torch.optim.AdamW([p]) for group in self.param_groups for p in group["params"]}


@pytest.mark.parametrize(
    ("made", "held"),
    [(Sam, "base_optimizer"), (lambda p: Prepared(Sam(p)), "base_optimizer"), (Several, "each")],
    ids=["its own", "that of what it wraps", "in a dict"],
)
def test_an_optimizer_that_holds_another_one_with_a_state_is_refused(made: Make, held: str) -> None:
    model = nn.Linear(4, 4)
    remedy = rf"protect\(model, \[optimizer, optimizer\.{held}\]\)"
    with pytest.raises(ConfigError, match=f"holds AdamW as '{held}', which has a state of its own: .* {remedy}"):
        TrainingState([model], [made(model.parameters())], {})


def test_an_optimizer_within_another_is_kept_if_it_is_given() -> None:
    model = nn.Linear(4, 4)
    sam = Sam(model.parameters())
    state = TrainingState([model], [sam, sam.base_optimizer], {})
    tensors, text = state.take()
    kept = [tensor.clone() for tensor in tensors]
    model(torch.ones(1, 4)).sum().backward()
    sam.base_optimizer.step()
    state.put(kept, text)
    assert not sam.base_optimizer.state
    TrainingState([model], [Prepared(sam.base_optimizer)], {})


def test_a_scaler_whose_iteration_was_given_up_begins_anew() -> None:
    model, scaler = nn.Linear(4, 4), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState([model], [optimizer], {"scaler": scaler})

    def step(*, lost_in_clipping: bool = False) -> None:
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        if not lost_in_clipping:
            scaler.step(optimizer)
            scaler.update()

    step()
    kept, text = state.take()
    tensors = [tensor.clone() for tensor in kept]
    step(lost_in_clipping=True)
    state.put(tensors, text)
    step()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Linear(6, 3), r"0\.weight: torch\.float32 \[3, 6\] here, 0\.weight: torch\.float32 \[8, 6\] there"),
        (nn.Linear(6, 8, dtype=torch.float64), r"torch\.float64 \[8, 6\] here"),
        (nn.Linear(6, 8), r"2 tensors here, \d+ there"),
    ],
)
def test_a_state_of_another_model_is_refused_and_changes_nothing(other: nn.Module, message: str) -> None:
    kept = Trained(OPTIMIZERS["sgd"]).take()
    model = nn.Sequential(other)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=message):
        TrainingState([model], [optimizer], {}).put(*kept)
    assert all(torch.equal(mine, old) for mine, old in zip(model.parameters(), before, strict=True))


def test_another_set_of_states_is_refused() -> None:
    one = Trained(OPTIMIZERS["sgd"])
    with pytest.raises(ConfigError, match=r"1 optimizers and \['schedule'\], this process 1 and \[\]"):
        TrainingState([one.model], [one.optimizer], {}).put(*one.take())


def test_what_is_taken_shares_memory_with_what_is_trained() -> None:
    """Taking a state copies no tensor: the slot's copy is the only one."""
    one = Trained(OPTIMIZERS["adamw"])
    one.step()
    tensors, text = one.state.take()
    places = {tensor.data_ptr() for tensor in tensors}
    moments = [value for state in one.optimizer.state.values() for value in state.values() if value.dim()]
    assert {tensor.data_ptr() for tensor in (*one.model.parameters(), *moments)} <= places
    assert len(text) < 20_000


def shapes_taken(rank: int, world: int) -> tuple[list[torch.Size], list[torch.Size]]:
    """Of the parameters' local parts, before and after an evaluation."""
    model: Any = fully_shard(nn.Linear(4, 6))
    state = TrainingState([model], [torch.optim.SGD(model.parameters(), lr=0.1)], {})
    before = [tensor.shape for tensor in state.take()[0]][:2]
    with torch.no_grad():
        model(torch.ones(1, 4))
    return before, [tensor.shape for tensor in state.take()[0]][:2]


def test_shards_are_kept_after_an_evaluation_too(ranks) -> None:
    for before, after in ranks(2).run(shapes_taken):
        assert before == after == [torch.Size([3, 4]), torch.Size([3])]
