"""What can only be checked where the job runs: that its model and data exist and its folders can be written.

Chose to run these checks once, in the process that launches the ranks, over letting the first rank fail: the message is
one line and comes before any rank has loaded torch. The cost is that a folder may still vanish or fill up afterwards.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from odc.arms import ArmName, arm_named
from odc.errors import ConfigError
from odc.experiments.config import JobConfig

#: Files of an output folder that say that a run has written there.
RUN_FILES = ("steps.jsonl", "checkpoints/latest")


def preflight(config: JobConfig) -> None:
    """Checks on this machine what a `JobConfig` cannot check by itself: model, data, and folders that can be written.

    Makes the output and export folders if they are missing. Raises `ConfigError` naming the option, or
    `UnsupportedError` where this machine lacks what the arm needs.
    """
    if config.output is not None:
        _refuse_other_run(Path(config.output), config.resume)
    check_arm(config, config.arm)
    model_source(config.model)
    if config.data != "stdlib" and not Path(config.data).exists():
        raise ConfigError(f"data: there is no file or folder {config.data}")
    for name in ("output", "export", "spans"):
        folder = getattr(config, name)
        if folder is not None:
            writable_folder(Path(folder), name)
    if config.export is not None and any(Path(config.export).iterdir()):
        raise ConfigError(f"export: {config.export} is not empty; name a new folder")
    if config.resume is not None:
        from odc.experiments.checkpoint import find_checkpoint  # loads torch

        find_checkpoint(Path(config.resume))


def _refuse_other_run(output: Path, resume: str | None) -> None:
    """Raises `ConfigError` if `output` holds a run and the job does not go on from that run's last checkpoint."""
    if not any((output / name).is_file() for name in RUN_FILES):
        return
    from odc.experiments.checkpoint import find_checkpoint  # loads torch

    last = None
    with contextlib.suppress(ConfigError):
        last = find_checkpoint(output).resolve()
    if last is None:
        raise ConfigError(f"output: {output} holds a run that left no checkpoint to --resume; name a new folder")
    if resume is None:
        raise ConfigError(f"output: {output} holds a run; go on with it by --resume {output}, or name a new folder")
    if find_checkpoint(Path(resume)).resolve() != last:
        raise ConfigError(
            f"output: {output} holds a run whose last checkpoint is not --resume {resume}; name a new folder"
        )


def check_arm(config: JobConfig, arm: ArmName) -> None:
    """Raises `UnsupportedError`, or `ConfigError`, if this machine lacks what the arm needs; says what to do."""
    if arm_named(arm).dynamic:
        from odc.memory import require_add  # loads torch

        require_add()
    if config.device != "cpu":
        from odc.experiments.device import check_device  # loads torch

        check_device(config, arm)


def model_source(model: str) -> Path:
    """The file or folder that `model` means: a path, or the name of a config that comes with odc."""
    path = Path(model)
    if path.exists():
        return path
    if path.suffix or len(path.parts) > 1:
        raise ConfigError(f"model: there is no file or folder {model}")
    from odc.experiments.text.model import shipped_config  # loads torch

    return shipped_config(model)


def unwritten_file(file: Path, name: str) -> None:
    """Proves that `file` can be written and that no run has written to it; `name` is the option to blame."""
    writable_folder(file.resolve().parent, name)
    if file.is_file() and file.stat().st_size:
        raise ConfigError(f"{name}: {file} holds the steps of a run already; name a new file")


def writable_folder(folder: Path, name: str) -> None:
    """Makes `folder` if it is missing and proves that a file can be written in it; `name` is the option to blame."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: cannot write to {folder}: {error.strerror or error}") from error
