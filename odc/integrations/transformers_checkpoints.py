"""What a Trainer's checkpoint holds of a sharded model and its optimizer: gathered to be saved, and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from odc.errors import ConfigError

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def weights_for(model: Any, kind: Any, checkpoint: str) -> dict[str, Any]:
    """The whole saved weights, under the names that they have in `model`; waits for no other rank.

    `kind`, the model's class, reads them if it can, because some have another name in the files. What it does not make,
    as the model was changed after it was made, is there under the model's names. Raises ConfigError naming what is in
    neither.
    """
    own: dict[str, Any] = get_model_state_dict(model)
    shapes = {name: value.shape for name, value in own.items()}
    weights: dict[str, Any] = {}
    if isinstance(model, PreTrainedModel):
        fresh, found = kind.from_pretrained(checkpoint, ignore_mismatched_sizes=True, output_loading_info=True)
        unread = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
        read = fresh.state_dict()
        weights = {
            name: read[name]
            for name, shape in shapes.items()
            if name in read and name not in unread and read[name].shape == shape
        }
    for file in sorted(Path(checkpoint).glob("*.safetensors")) if len(weights) < len(shapes) else ():
        with safe_open(file, framework="pt") as opened:
            for name in shapes.keys() & {*opened.keys()} - weights.keys():
                if opened.get_slice(name).get_shape() == [*shapes[name]]:
                    weights[name] = opened.get_tensor(name)
    if missing := sorted(shapes.keys() - weights.keys()):
        raise ConfigError(f"{checkpoint} has no weights of the model's shape for {', '.join(missing)}")
    return weights


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


def adapter_weights(model: Any, checkpoint: str) -> dict[str, Any]:
    """The saved adapter of a `PeftModel`, under the names that its parameters have in `model`."""
    from peft import get_peft_model_state_dict, load_peft_weights

    # Given names in place of weights, PEFT returns which parameter it saves under which name.
    names = {name: name for name, _ in model.named_parameters()}
    saved_as = get_peft_model_state_dict(model, names, save_embedding_layers=False)
    saved = load_peft_weights(checkpoint, device="cpu")
    return {name: saved[key] for key, name in saved_as.items()}


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
