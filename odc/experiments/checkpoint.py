"""Checkpoints of a sharded job: `<output>/checkpoints/step-00000010/{*.distcp, .metadata, job.json}`.

A job may resume on another number of ranks. A folder ends in `.partial` until it is complete and is then named by the
file `checkpoints/latest`: a job killed at any point leaves the previous one whole. Nothing removes old checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Module
from torch.optim import Optimizer

from odc.errors import ConfigError, OdcError

FOLDER = "checkpoints"
LATEST = "latest"
JOB_FILE = "job.json"
_ON_CUDA = "-cuda"
_OLD = ".old.partial"  # ends the folder of a step that is saved again, until the new one is named
_MOMENTS = "optimizer.state"  # a parameter's have its name and their own after it


class CheckpointError(OdcError):
    """A checkpoint cannot be written or read; raised on every rank."""


def find_checkpoint(path: Path) -> Path:
    """The checkpoint folder that `path` means: itself, or the latest of an output folder. ConfigError without one."""
    if (path / JOB_FILE).is_file():
        return path
    for folder in (path, path / FOLDER):
        marker = folder / LATEST
        if marker.is_file():
            found = folder / marker.read_text().strip()
            for one in (found, found.with_name(found.name + _OLD)):
                if (one / JOB_FILE).is_file():
                    return one
            raise ConfigError(f"resume: {marker} names {found.name}, which is not there or not complete")
    raise ConfigError(f"resume: no checkpoint in {path} (expected {JOB_FILE}, {LATEST} or {FOLDER}/{LATEST})")


def read_job(checkpoint: Path) -> dict[str, Any]:
    """What `save` was given as `job`, plus `step`; any process may call it."""
    try:
        job: dict[str, Any] = json.loads((checkpoint / JOB_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"resume: cannot read {checkpoint / JOB_FILE}: {error}") from error
    return job


def save(output: Path, step: int, model: Module, optimizer: Optimizer, job: dict[str, Any]) -> Path:
    """Writes the checkpoint of `step` and marks it `latest`; returns its folder.

    Every rank calls it, outside a minibatch; it meets the other ranks. `job` holds JSON types, the same on every rank.
    Raises `CheckpointError` on every rank if the disk refuses.
    """
    folder = output / FOLDER
    final = folder / f"step-{step:08d}"
    partial = folder / f"{final.name}.partial"
    together(lambda: _clear(folder, partial), f"cannot prepare {partial}")
    try:
        state_dict_saver.save(_state(model, optimizer), checkpoint_id=partial)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"step {step}: cannot write the checkpoint {partial}: {_reason(error)}") from error

    def complete() -> None:
        _refuse_parts(partial)
        _complete(partial, final, {"step": step} | job)

    together(complete, f"cannot complete {final}")
    return final


def load(checkpoint: Path, model: Module, optimizer: Optimizer, *, alone: bool = False) -> dict[str, Any]:
    """Fills model, optimizer and this rank's random state from `checkpoint`; returns `read_job`'s result.

    Every rank calls it with a sharded model, outside a minibatch; it meets the other ranks, unless each loads `alone`.
    On another number of ranks than the saved one the random state is left as it is.
    """
    job = read_job(checkpoint)
    state = _state(model, optimizer)
    try:
        saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        # A parameter that had no gradient until then, of a tower that no rank had run, has no moments yet.
        moments = state["optimizer"]["state"]
        for name in [name for name in moments if not any(f"{_MOMENTS}.{name}.{key}" in saved for key in moments[name])]:
            del moments[name]
        random = state["random"] = {key: own for key, own in state["random"].items() if f"random.{key}" in saved}
        state_dict_loader.load(state, checkpoint_id=checkpoint, no_dist=alone)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"cannot load the checkpoint {checkpoint}: {_reason(error)}") from error
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=StateDictOptions(strict=False))
    for key, own in random.items():
        (torch.cuda.set_rng_state if key.endswith(_ON_CUDA) else torch.set_rng_state)(own)
    return job


def _reason(error: BaseException) -> str:
    """What went wrong, of torch's exception, which holds a traceback of each rank, on the first of them."""
    if not isinstance(error, CheckpointException):
        return str(error)
    rank, (found, _) = min(error.failures.items(), key=lambda one: one[0])
    return f"rank {rank}: {type(found).__name__}: {found}"


def _state(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    """With uint8 states of this rank's generators: the CPU's, and its CUDA device's where it has one."""
    parameters, moments = get_state_dict(model, optimizer)
    key = f"{dist.get_rank()}of{dist.get_world_size()}"
    random = {key: torch.get_rng_state()}
    if torch.cuda.is_initialized():
        random[key + _ON_CUDA] = torch.cuda.get_rng_state()
    return {"model": parameters, "optimizer": moments, "random": random}


def _clear(folder: Path, partial: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"*{_OLD}"):
        final = old.with_name(old.name.removesuffix(_OLD))
        if not final.exists():  # the job ended between two renames
            os.rename(old, final)
    for left in folder.glob("*.partial"):
        shutil.rmtree(left)
    partial.mkdir()


def _refuse_parts(partial: Path) -> None:
    """Where each host has a folder of its own, the first has only what its own ranks have written."""
    files = {one.relative_path for one in FileSystemReader(partial).read_metadata().storage_data.values()}
    if missing := sorted(file for file in files if not (partial / file).is_file()):
        raise OdcError(f"{missing[0]} is not there: all hosts must share the output folder, and each has its own")


def _complete(partial: Path, final: Path, job: dict[str, Any]) -> None:
    (partial / JOB_FILE).write_text(json.dumps(job, indent=1) + "\n")
    before = final.with_name(final.name + _OLD)
    if final.exists():  # of a step that is saved again, which `latest` may name
        os.rename(final, before)
    os.rename(partial, final)
    marker = final.parent / f"{LATEST}.partial-marker"
    marker.write_text(final.name + "\n")
    os.replace(marker, final.parent / LATEST)
    if before.exists():
        shutil.rmtree(before)


def together(action: Callable[[], None], failure: str) -> None:
    """Runs `action` on rank 0 while the others wait, and raises `CheckpointError` on all when it fails."""
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:  # of any kind: the other ranks wait for the outcome
            outcome = [f"{failure}: {getattr(error, 'strerror', None) or error}"]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise CheckpointError(outcome[0])
