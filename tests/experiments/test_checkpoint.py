from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from odc.errors import ConfigError
from odc.experiments import checkpoint
from odc.experiments.checkpoint import CheckpointError, find_checkpoint, load, read_job, save
from odc.experiments.launch import launch


class Model(torch.nn.Module):
    """Its tower runs only when asked for, as does one of a modality that few minibatches have."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.first, self.last = torch.nn.Linear(5, 5), torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)

    def forward(self, inputs: torch.Tensor, tower: bool) -> torch.Tensor:
        return self.last(self.first(self.tower(inputs) if tower else inputs).tanh())


def _sharded(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    for module in (model.tower, model.first, model):
        fully_shard(module)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, tower: bool = False) -> None:
    for _ in range(steps):
        model(torch.randn(4, 5), tower).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _bits(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def _save_and_load(folder: str) -> None:
    dist.init_process_group("gloo")
    output = Path(folder)
    model, optimizer = _sharded(seed=1)
    torch.manual_seed(10 + dist.get_rank())
    _train(model, optimizer, 2)
    first = save(output, 2, model, optimizer, {"sampler": {"position": 17}})
    _train(model, optimizer, 2, tower=True)
    straight = _bits(model)
    save(output, 4, model, optimizer, {"sampler": {"position": 34}})

    other, fresh = _sharded(seed=2)
    job = load(first, other, fresh)
    assert job == {"step": 2, "sampler": {"position": 17}}
    assert len(fresh.state) == 4, "the tower has moments, but never had a gradient"
    _train(other, fresh, 2, tower=True)
    for expected, got in zip(straight, _bits(other), strict=True):
        assert torch.equal(expected, got)

    save(output, 2, other, fresh, {"sampler": {"position": 99}})
    assert read_job(first)["sampler"]["position"] == 99
    dist.barrier()
    dist.destroy_process_group()


def _save_onto_a_file(folder: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = _sharded(seed=1)
    with pytest.raises(CheckpointError, match="cannot prepare"):
        save(Path(folder), 1, model, optimizer, {})
    dist.barrier()
    dist.destroy_process_group()


def _load_what_is_damaged(folder: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = _sharded(seed=1)
    saved = save(Path(folder), 1, model, optimizer, {})
    if dist.get_rank() == 0:
        for part in saved.glob("*.distcp"):
            part.write_bytes(b"")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"^cannot load the checkpoint .*step-00000001: rank \d: \w+: ") as error:
        load(saved, model, optimizer)
    assert "Traceback" not in str(error.value)
    dist.barrier()
    if dist.get_rank() == 0:
        (saved / ".metadata").write_bytes(b"")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"^cannot load the checkpoint .*step-00000001: Ran out of input"):
        load(saved, model, optimizer)
    dist.barrier()
    dist.destroy_process_group()


def test_a_damaged_checkpoint_is_named_with_one_reason(tmp_path: Path) -> None:
    launch(_load_what_is_damaged, str(tmp_path), ranks=2)


def test_a_loaded_job_continues_bit_for_bit(tmp_path: Path) -> None:
    launch(_save_and_load, str(tmp_path), ranks=2)
    checkpoints = tmp_path / "checkpoints"
    assert sorted(os.listdir(checkpoints)) == ["latest", "step-00000002", "step-00000004"]
    assert find_checkpoint(tmp_path) == checkpoints / "step-00000002"
    assert find_checkpoint(checkpoints / "step-00000004") == checkpoints / "step-00000004"


def saved_again(output: Path, *patched: Any) -> tuple[Path, Path, Path]:
    """The folders of a job that saves step 2 twice, and ends in the second time, by what is patched."""
    folder = output / checkpoint.FOLDER
    partial, final = folder / "step-00000002.partial", folder / "step-00000002"
    checkpoint._clear(folder, partial)
    checkpoint._complete(partial, final, {"step": 2, "position": 1})
    checkpoint._clear(folder, partial)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*patched)
        with pytest.raises(KeyboardInterrupt):
            checkpoint._complete(partial, final, {"step": 2, "position": 2})
    return folder, partial, final


def test_a_step_is_saved_again_by_a_job_that_ends_meanwhile(tmp_path: Path) -> None:
    """In removing the checkpoint before, which takes longest."""

    def end(path: Path) -> None:
        (path / checkpoint.JOB_FILE).unlink()
        raise KeyboardInterrupt

    folder, partial, final = saved_again(tmp_path, checkpoint.shutil, "rmtree", end)
    assert read_job(find_checkpoint(tmp_path)) == {"step": 2, "position": 2}
    checkpoint._clear(folder, partial)
    assert sorted(os.listdir(folder)) == ["latest", final.name, partial.name]


def test_a_job_that_ends_between_two_renames_keeps_what_it_saved(tmp_path: Path) -> None:
    rename = os.rename

    def end(source: Path, target: Path) -> None:
        if target.name == "step-00000002":
            raise KeyboardInterrupt
        rename(source, target)

    folder, partial, final = saved_again(tmp_path, checkpoint.os, "rename", end)
    assert read_job(find_checkpoint(tmp_path)) == {"step": 2, "position": 1}
    checkpoint._clear(folder, partial)
    assert find_checkpoint(tmp_path) == final
    assert sorted(os.listdir(folder)) == ["latest", final.name, partial.name]


def test_every_rank_raises_when_the_disk_refuses(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    launch(_save_onto_a_file, str(tmp_path), ranks=2)


def _save_apart(folder: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = _sharded(seed=1)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is not there: all hosts must share the output folder"):
        save(Path(folder, str(dist.get_rank())), 1, model, optimizer, {})
    dist.barrier()
    dist.destroy_process_group()


def test_hosts_that_write_to_folders_of_their_own_are_refused(tmp_path: Path) -> None:
    """Half of the checkpoint would be where a job that resumes does not look."""
    launch(_save_apart, str(tmp_path), ranks=2)
    assert not (tmp_path / "0" / "checkpoints" / "latest").exists()


def test_a_folder_without_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint in"):
        find_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("step-00000009\n")
    with pytest.raises(ConfigError, match="step-00000009, which is not there"):
        find_checkpoint(tmp_path)
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        read_job(tmp_path)
