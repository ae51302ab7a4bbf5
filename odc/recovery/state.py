"""A training state as tensors and a text, and back into the same objects.

It has the local parts of parameters and buffers, all of the optimizers' states, the states of whatever else has
`state_dict` and `load_state_dict`, and those of the random number generators. Calls no collective.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from odc.errors import ConfigError, UnsupportedError
from odc.fsdp import reshard_all
from odc.fsdp._torch_amp import begin_iteration


class Division(NamedTuple):
    """How a tensor is divided: along `dim`, in which all ranks together have `rows`."""

    dim: int
    rows: int


#: This rank's part of the tensor with a number, which was divided so among the ranks that kept it.
Part = Callable[[int, Division], torch.Tensor]


class _NamedTensor(NamedTuple):
    """A parameter, or a buffer of `module`."""

    name: str
    tensor: torch.Tensor
    module: nn.Module | None = None

    @property
    def place(self) -> tuple[Any, ...]:
        """Of two buffers that are one tensor the same."""
        local = _local(self.tensor)
        return local.data_ptr(), local.shape, local.stride()

    def put(self, value: torch.Tensor, *, shared: bool = False) -> None:
        """Change it, in place. A buffer is replaced that has another shape, since a forward may have made it larger; or
        other values, where it is `shared` with one that was put before, or all of a dimension is one element.
        """
        local = _local(self.tensor)
        if local.shape == value.shape and not shared and not _repeats(local):
            local.copy_(value)
        elif local.shape != value.shape or not torch.equal(local, value.to(local.device)):
            setattr(self.module, self.name.rpartition(".")[2], value.to(local.device, copy=True))


class Stateful(Protocol):
    """Schedulers, batches, and what a loop has of its own; torch's protocol of the same name."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@dataclass(frozen=True)
class TrainingState:
    """What one rank trains: everything that a step changes. Objects stay the same when a state is put back."""

    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    others: Mapping[str, Stateful]
    _begun: list[dict[str, Any]] = field(default_factory=list, init=False)  # the modes of the first attempt

    def __post_init__(self) -> None:
        """ConfigError where an optimizer holds another one that has a state of its own and is not among these."""
        known = [*self.optimizers]
        for optimizer in known:  # it grows
            for name, inner in _held_by(optimizer):
                if inner in known:
                    continue
                if not any(inner.state is one.state for one in known):
                    raise ConfigError(
                        f"{type(optimizer).__name__} holds {type(inner).__name__} as {name!r}, which has a state of "
                        f"its own: give both to protect(), as in protect(model, [optimizer, optimizer.{name}])"
                    )
                known.append(inner)

    def begin(self) -> None:
        """Note the modes with which the first attempt begins: what a program did before the loop is not repeated."""
        if not self._begun:
            self._begun.append(self._modes())

    def take(self) -> tuple[list[torch.Tensor], bytes]:
        """Tensors, which share memory with what is trained, and a text with everything else.

        Outside of forward and backward. Frees what an evaluation has left unsharded.
        """
        named = list(self._named())
        tensors = [_local(one.tensor) for one in named]
        rest = {
            "names": [one.name for one in named],
            "optimizers": [_state_of(optimizer) for optimizer in self.optimizers],
            "others": {name: other.state_dict() for name, other in self.others.items()},
            "random": random_states(),
            **self._modes(),
        }
        text = io.BytesIO()
        _Pickler(text, tensors, meshes_of(self.models)).dump(rest)
        return tensors, text.getvalue()

    @torch.no_grad()
    def put(
        self,
        tensors: Sequence[torch.Tensor],
        text: bytes,
        part: Part | None = None,
        *,
        random: bool = True,
        first: bool = False,
    ) -> None:
        """Back to a state that `take` gave on the same rank, perhaps in another process. `.grad` is cleared.

        With `part` it was given where there were fewer or more ranks: what is sharded comes from there. Without
        `random` the random number generators stay as they are. `first`: it is the state of before the first attempt,
        whose modes are those of `begin`.
        A buffer gets the shape that it had.

        Raises ConfigError where parameters or buffers have other names or dtypes, parameters other shapes, or where
        there are other optimizers, parameter groups or `others`; nothing is changed then.
        """

        def read(number: int, cut: Division | None) -> torch.Tensor:
            return tensors[number] if part is None or cut is None else part(number, cut)

        rest = _Unpickler(io.BytesIO(text), read, meshes_of(self.models)).load()
        named = list(self._named())
        cuts = [_division_of(one.tensor) for one in named[: len(rest["names"])]]
        kept = [read(i, cut) for i, cut in enumerate(cuts)] + list(tensors[len(cuts) : len(rest["names"])])
        _refuse_other(named, list(zip(rest["names"], kept, strict=True)))
        self._refuse_others(rest)
        places = set[tuple[Any, ...]]()
        for one, value in zip(named, kept, strict=True):
            one.put(value, shared=one.module is not None and one.place in places)
            places.add(one.place)
        for model in self.models:
            model.zero_grad(set_to_none=True)
        self._set_modes(self._begun[0] if first and self._begun else rest)
        for optimizer, state in zip(self.optimizers, rest["optimizers"], strict=True):
            _put_back(optimizer, state)
        for name, other in self.others.items():
            other.load_state_dict(rest["others"][name])
            if isinstance(other, GradScaler):
                begin_iteration(other)
        if random:
            set_random_states(rest["random"])

    def _modes(self) -> dict[str, Any]:
        """Whether each parameter is trained, and the names of the modules of each model that are in eval mode."""
        return {
            "trained": bytes(one.requires_grad for model in self.models for one in model.parameters()),
            "evaluating": [{name for name, one in model.named_modules() if not one.training} for model in self.models],
        }

    def _set_modes(self, modes: Mapping[str, Any]) -> None:
        parameters = [one for model in self.models for one in model.parameters()]
        for parameter, trained in zip(parameters, modes["trained"], strict=True):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(bool(trained))
        for model, evaluating in zip(self.models, modes["evaluating"], strict=True):
            for name, module in model.named_modules():
                module.training = name not in evaluating

    def _refuse_others(self, rest: dict[str, Any]) -> None:
        if rest["others"].keys() != self.others.keys() or len(rest["optimizers"]) != len(self.optimizers):
            raise ConfigError(
                f"the kept state has {len(rest['optimizers'])} optimizers and {sorted(rest['others'])}, this process "
                f"{len(self.optimizers)} and {sorted(self.others)}"
            )
        for optimizer, kept in zip(self.optimizers, rest["optimizers"], strict=True):
            if len(kept["groups"]) != len(optimizer.param_groups):
                raise ConfigError(
                    f"the kept state has {len(kept['groups'])} parameter groups of {type(optimizer).__name__}, this "
                    f"process {len(optimizer.param_groups)}: add all of them before protect()"
                )

    def refuse_undivided(self) -> None:
        """UnsupportedError if an optimizer keeps a plain tensor for a sharded parameter, of which among another number
        of ranks no one could know which part is whose, or if meshes differ, which get one name then.
        """
        if len(meshes := meshes_of(self.models)) > 1:
            raise UnsupportedError(
                f"where the number of ranks changes, all units need the same mesh; there are {meshes}"
            )
        for optimizer in self.optimizers:
            sharded = {key: state for key, state in optimizer.state.items() if isinstance(key, DTensor)}
            for state in sharded.values():
                for name, value in state.items():
                    plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
                    if plain and value.numel() > 1:
                        raise UnsupportedError(
                            f"{type(optimizer).__name__} keeps {name!r}, a plain tensor, for a sharded parameter: the "
                            "number of ranks cannot change with it"
                        )

    def _named(self) -> Iterator[_NamedTensor]:
        """Parameters and buffers, with their names."""
        for model in self.models:
            reshard_all(model)
        for i, model in enumerate(self.models):
            parameters = (_NamedTensor(*one) for one in model.named_parameters())
            for one in (*parameters, *_buffers(model)):
                yield one._replace(name=f"{i}.{one.name}") if i else one


def _buffers(model: nn.Module) -> Iterator[_NamedTensor]:
    """Of each module all, also those that are one tensor, which a forward may make of two; shared modules come once."""
    for prefix, module in model.named_modules():
        for name, tensor in module.named_buffers(prefix, recurse=False, remove_duplicate=False):
            yield _NamedTensor(name, tensor, module)


def meshes_of(models: Iterable[nn.Module]) -> list[DeviceMesh]:
    """The meshes of sharded parameters, in their order, which is the same in every process. Equal ones count as one:
    each `fully_shard` makes its own, and when the number of ranks changes all get a new one.
    """
    parameters = (parameter for model in models for parameter in model.parameters())
    return list(dict.fromkeys(parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)))


def _division_of(tensor: torch.Tensor) -> Division | None:
    return _division(tensor.placements, tensor.shape) if isinstance(tensor, DTensor) else None


def _division(placements: Sequence[Any], shape: Sequence[int]) -> Division | None:
    (placement,) = placements
    return Division(placement.dim % len(shape), shape[placement.dim]) if placement.is_shard() else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether an element stands for several, as `expand` makes them."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _refuse_other(mine: Sequence[_NamedTensor], kept: Sequence[tuple[str, torch.Tensor]]) -> None:
    buffers = {one.name for one in mine if one.module is not None}

    def described(name: str, tensor: torch.Tensor) -> str:
        return f"{name}: {tensor.dtype}" + ("" if name in buffers else f" {list(tensor.shape)}")

    here, there = [described(one.name, _local(one.tensor)) for one in mine], [described(*one) for one in kept]
    if here != there:
        first = next((pair for pair in zip(here, there, strict=False) if pair[0] != pair[1]), None)
        differs = f"{first[0]} here, {first[1]} there" if first else f"{len(here)} tensors here, {len(there)} there"
        raise ConfigError(f"the kept state is of another model: {differs}; build the same model in a replacement")


def _held_by(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """The optimizers that are attributes of an optimizer, or in a list, tuple or dict that is one; by its name."""
    for name, value in vars(optimizer).items():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        yield from ((name, one) for one in several if isinstance(one, torch.optim.Optimizer))


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As `state_dict`, but without its hooks and without gathering anything: by the number of the parameter.

    `common` are the entries of its state that are no parameter's.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    known = optimizer.state
    state = {i: dict(known[p]) for i, p in enumerate(parameters) if p in known}
    common = {key: value for key, value in known.items() if not isinstance(key, torch.Tensor)}
    return {"state": state, "common": common, "groups": groups}


def _put_back(optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()  # also what came after the kept step
    optimizer.state.update(kept["common"])
    for i, state in kept["state"].items():
        optimizer.state[parameters[i]] = state
    for group, values in zip(optimizer.param_groups, kept["groups"], strict=True):
        for key in group.keys() - values.keys() - {"params"}:
            del group[key]  # what came after the kept step
        for key, value in values.items():
            if isinstance(group.get(key), torch.Tensor):  # a learning rate that others refer to
                group[key].copy_(value)
            else:
                group[key] = value


def random_states() -> dict[str, Any]:
    """Of torch's, numpy's and Python's global generators, in this process; on devices of the current one."""
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Back to what `random_states` gave."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    random.setstate(states["python"])
    if states["numpy"] is not None:
        import numpy

        numpy.random.set_state(states["numpy"])


class _Pickler(pickle.Pickler):
    """Puts tensors aside, in `tensors`, wherever in a state they are."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], meshes: list[DeviceMesh]) -> None:
        super().__init__(file)
        self._tensors, self._meshes = tensors, meshes

    def persistent_id(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return None
        local = _local(thing)
        if type(local) not in (torch.Tensor, torch.nn.Parameter):  # as optimizers of 8 bits have them
            raise UnsupportedError(f"recovery is for states of plain tensors, and one is a {type(local).__name__}")
        self._tensors.append(local)
        number, spread = len(self._tensors) - 1, None
        if isinstance(thing, DTensor):
            if thing.device_mesh not in self._meshes:
                raise UnsupportedError(
                    f"recovery is for states on meshes of parameters; a tensor is on {thing.device_mesh}"
                )
            mesh = self._meshes.index(thing.device_mesh)
            spread = mesh, tuple(thing.placements), tuple(thing.shape), tuple(thing.stride())
        return number, thing.device.type, spread  # a new process may give its device another number


class _Unpickler(pickle.Unpickler):
    """Makes copies of the tensors that a `_Pickler` put aside, which `read` finds."""

    def __init__(
        self, file: io.BytesIO, read: Callable[[int, Division | None], torch.Tensor], meshes: list[DeviceMesh]
    ) -> None:
        super().__init__(file)
        self._read, self._meshes = read, meshes

    def persistent_load(self, pid: Any) -> torch.Tensor:
        number, device, spread = pid
        if spread is None:
            return self._read(number, None).to(device, copy=True)
        mesh, placements, shape, stride = spread
        local = self._read(number, _division(placements, shape)).to(device, copy=True)
        made: torch.Tensor = DTensor.from_local(
            local, self._meshes[mesh], placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        return made
