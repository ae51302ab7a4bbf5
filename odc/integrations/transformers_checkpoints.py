"""What a Trainer's checkpoint holds of a sharded model and its optimizer: gathered to be saved, and read again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer

from odc.errors import ConfigError

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def reads(options: StateDictOptions) -> bool:
    """Whether this rank reads a whole state that is loaded so."""
    return not options.broadcast_from_rank0 or dist.get_rank() == 0


def weights_for(model: Any, kind: Any, checkpoint: str) -> dict[str, Any]:
    """The whole saved weights, under the names that they have in `model`; waits for no other rank.

    `kind`, the model's class, reads them if it can, because some have another name in the files. What it does not make,
    as the model was changed after it was made, is there under the model's names. Raises ConfigError naming what is in
    neither.
    """
    own: dict[str, Any] = get_model_state_dict(model)
    shapes = {name: value.shape for name, value in own.items()}
    weights, unable = dict[str, Any](), None
    if isinstance(model, PreTrainedModel):
        dtypes = {value.dtype for value in own.values() if value.is_floating_point()}
        try:
            read = _read_by(kind, checkpoint, max(dtypes, key=lambda one: one.itemsize))
        except Exception as error:  # a class may take more than a config
            read, unable = {}, error
        weights = {name: read[name] for name, shape in shapes.items() if name in read and read[name].shape == shape}
    for file in sorted(Path(checkpoint).glob("*.safetensors")) if len(weights) < len(shapes) else ():
        with safe_open(file, framework="pt") as opened:
            for name in shapes.keys() & {*opened.keys()} - weights.keys():
                if opened.get_slice(name).get_shape() == [*shapes[name]]:
                    weights[name] = opened.get_tensor(name)
    if missing := sorted(shapes.keys() - weights.keys()):
        why = f"; {kind.__name__} could not read it: {unable}" if unable else ""
        raise ConfigError(f"{checkpoint} has no weights of the model's shape for {', '.join(missing)}{why}") from unable
    return weights


def _read_by(kind: Any, checkpoint: str, dtype: torch.dtype) -> dict[str, Any]:
    """The saved weights that a model of this class makes, in a dtype that holds each of the checkpoint's exactly.

    By itself transformers rounds all to one: that of the first weight, which may be one of few that are not trained.
    """
    fresh, found = kind.from_pretrained(checkpoint, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True)
    unread = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    return {name: value for name, value in fresh.state_dict().items() if name not in unread}


def load_weights(model: Any, kind: Any, checkpoint: str, options: StateDictOptions) -> None:
    """Load the whole saved weights; with `broadcast_from_rank0` the first rank reads them, and it is a collective.

    ConfigError, on every rank, for what is missing or cannot be read.
    """
    weights, wrong, cause = dict[str, Any](), list[str | None]([None]), None
    if reads(options):
        try:
            weights = weights_for(model, kind, checkpoint)
        except Exception as error:  # of any kind: the other ranks wait for the outcome
            cause, text = error, str(error)
            wrong = [text if isinstance(error, ConfigError) else f"{checkpoint} cannot be read: {text}"]
    if options.broadcast_from_rank0:
        dist.broadcast_object_list(wrong)
    if wrong[0] is not None:
        raise ConfigError(wrong[0]) from cause
    set_model_state_dict(model, weights, options=options)


def load_optimizer(model: Any, optimizer: Any, state: dict[str, Any], options: StateDictOptions) -> None:
    """Load a whole optimizer state; with `broadcast_from_rank0` that of the first rank, and then a collective.

    A parameter that had no gradient until it was saved has no state, and has none then. Nor has any, of plain SGD.
    A stock Trainer's state, which numbers parameters, is loaded too. ConfigError if it is another model's.
    """
    wrong = None
    try:
        state = _named(state, model, optimizer)
    except ConfigError as error:
        wrong = str(error)
    parts: list[Any] = [(state.get("param_groups"), {*state.get("state", ())}, wrong)]
    if options.broadcast_from_rank0:
        dist.broadcast_object_list(parts)
    groups, known, wrong = parts[0]
    if wrong is not None:
        raise ConfigError(wrong)
    if not known:  # torch asks a tensor of the state for its device
        set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": groups})
        return
    without = {name for group in groups for name in group["params"]} - known
    if state:  # torch demands an entry for each parameter
        state["state"] |= {name: {} for name in without}
    set_optimizer_state_dict(model, optimizer, state, options=options)
    for name, parameter in model.named_parameters():
        if name in without:  # torch has made it one, as after a step with a gradient of zeros
            optimizer.state.pop(parameter, None)


def _named(state: dict[str, Any], model: Any, optimizer: Any) -> dict[str, Any]:
    """A whole optimizer state, with parameters by name in place of their numbers."""
    groups = state.get("param_groups", ())
    if not any(isinstance(one, int) for group in groups for one in group["params"]):
        return state
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if [*map(len, own)] != [len(group["params"]) for group in groups]:
        raise ConfigError("the checkpoint's optimizer has other parameters than this one: it is another model's")
    name_of: dict[int, str] = {}
    for group, mine in zip(groups, own, strict=True):
        name_of |= zip(group["params"], mine, strict=True)
    return {
        "state": {name_of[number]: moments for number, moments in state["state"].items()},
        "param_groups": [group | {"params": mine} for group, mine in zip(groups, own, strict=True)],
    }


@contextlib.contextmanager
def without_stock_loading() -> Iterator[None]:
    """Inside, a Trainer loads neither optimizer nor schedule, but one of another library what else it has saved."""
    stock = Trainer._load_optimizer_and_scheduler
    Trainer._load_optimizer_and_scheduler = lambda *unused: None
    try:
        yield
    finally:
        Trainer._load_optimizer_and_scheduler = stock


def adapter_weights(model: Any, checkpoint: str) -> dict[str, Any]:
    """The saved adapters of a `PeftModel`, and embeddings beside them, under the names that they have in `model`.

    An adapter that the checkpoint does not hold, as one that was added since, is left out. Raises ConfigError if it
    holds none, or one without some of its weights.
    """
    from peft import get_peft_model_state_dict, load_peft_weights
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME

    # Given names in place of weights, PEFT returns which of them it saves under which name.
    names, weights = {name: name for name in get_model_state_dict(model)}, dict[str, Any]()
    for adapter in model.peft_config:
        folder = Path(checkpoint) if adapter == "default" else Path(checkpoint) / adapter
        if not any((folder / name).is_file() for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
            continue
        saved = load_peft_weights(str(folder), device="cpu")
        own = get_peft_model_state_dict(model, names, adapter, save_embedding_layers=False)
        if missing := sorted(own.keys() - saved.keys()):
            raise ConfigError(f"{folder} has no weights of adapter {adapter} for {', '.join(missing)}")
        either = get_peft_model_state_dict(model, names, adapter, save_embedding_layers=True)
        weights |= {name: saved[key] for key, name in either.items() if key in saved}
    if not weights:
        raise ConfigError(f"{checkpoint} holds none of the model's adapters: {', '.join(model.peft_config)}")
    return weights


def saved_weights(model: Any) -> dict[str, Any]:
    """What `save_pretrained` needs of the whole weights, on the first rank: of LoRA not those below it. A collective.

    Whether the embeddings are saved beside adapters, only the first rank finds out: all gather them.
    """
    adapters = {} if isinstance(model, PreTrainedModel) else getattr(model, "peft_config", {})
    if {config.peft_type for config in adapters.values()} != {"LORA"}:  # others compute with the weights
        weights: dict[str, Any] = get_model_state_dict(model, options=WHOLE)
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False) if weights else ():
            if name in weights:  # of tied ones the same, or both are written
                weights[name] = weights[first.setdefault(id(parameter), name)]
        return weights
    from peft import get_peft_model_state_dict

    state: dict[str, Any] = get_model_state_dict(model)
    names, saved = {name: name for name in state}, set[str]()
    for adapter in adapters:
        saved |= {*get_peft_model_state_dict(model, names, adapter, save_embedding_layers=True).values()}
    found = {}
    for name, value in state.items():
        if name not in saved:
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            found[name] = whole.cpu()
    return found
