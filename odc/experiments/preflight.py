"""What can only be checked where the job runs, before any rank starts: model, data, and folders that can be written."""

from __future__ import annotations

import contextlib
import tempfile
from importlib.util import find_spec
from pathlib import Path

from odc.arms import ArmName, arm_named
from odc.errors import ConfigError, install
from odc.experiments.checkpoint import find_checkpoint
from odc.experiments.config import TOKENIZERS, JobConfig
from odc.experiments.data.sources import is_datasets_folder, parquet_files
from odc.experiments.device import check_device
from odc.experiments.text.export import PARTIAL
from odc.experiments.text.model import has_weights, shipped_config
from odc.memory import require_add

_PROBE = ".odc-probe-"  # begins the name of a file that shows whether a folder can be written to

#: Files by which an output folder holds a run.
RUN_FILES = ("steps.jsonl", "checkpoints/latest")


def preflight(config: JobConfig) -> None:
    """Makes the output and export folders if they are missing, once everything else has been checked.

    Raises `ConfigError` naming the option, or `UnsupportedError` if this machine lacks what the arm needs.
    """
    check_extras(config)
    check_arm(config, config.arm)
    source = model_source(config.model)
    if config.lora and not has_weights(source):
        raise ConfigError(f"lora: {source} holds no weights to adapt; name a model folder with safetensors (--model)")
    for name in ("data", "valid"):
        path = getattr(config, name)
        if path not in (None, "stdlib") and not Path(path).exists():
            raise ConfigError(f"{name}: there is no file or folder {path}")
    if config.tokenizer not in TOKENIZERS and not Path(config.tokenizer).is_dir():
        raise ConfigError(f"tokenizer: {config.tokenizer} is no folder and none of {', '.join(TOKENIZERS)}")
    # Other ranks probe the folder at the same time, and NFS keeps a file that was removed while it is open.
    export = None if config.export is None else Path(config.export)
    names = [path.name for path in export.iterdir()] if export is not None and export.is_dir() else []
    found = [name for name in names if not name.startswith((_PROBE, ".nfs"))]
    if found and PARTIAL not in found:  # which is removed last: an export that was interrupted is written again
        raise ConfigError(f"export: {config.export} is not empty; name a new folder")
    check_output(config.output, config.resume)
    for name in ("export", "spans"):
        folder = getattr(config, name)
        if folder is not None:
            writable_folder(Path(folder), name)


def check_extras(config: JobConfig) -> None:
    """Raises `ConfigError` if a package is missing that the job will need; reads no data and makes no folder."""
    require("transformers", "train", "training a model")
    if config.lora:
        require("peft", "lora", "lora")
    for name in ("data", "valid"):
        if (path := getattr(config, name)) is not None:
            if parquet_files(Path(path)):
                require("pyarrow", "parquet", f"{name}: reading Parquet")
            elif is_datasets_folder(Path(path)):
                require("datasets", "datasets", f"{name}: reading a datasets folder")


def require(package: str, extra: str, doing: str) -> None:
    """Raises `ConfigError` that names how to install `package`, of odc's `extra`, if it is missing; imports nothing."""
    if find_spec(package) is None:
        raise ConfigError(f"{doing} needs {package}: {install(extra)}")


def check_output(output: str | None, resume: str | None, name: str = "output") -> None:
    """Raises `ConfigError` if `output`, the option `name`, cannot be written or holds a run that `resume` does not
    continue from its last checkpoint, or if there is no checkpoint to resume.
    """
    if output is not None:
        _refuse_other_run(Path(output), resume, name)
    if resume is not None:
        find_checkpoint(Path(resume))
    if output is not None:
        writable_folder(Path(output), name)


def _refuse_other_run(output: Path, resume: str | None, name: str) -> None:
    if not any((output / file).is_file() for file in RUN_FILES):
        return
    last = None
    with contextlib.suppress(ConfigError):
        last = find_checkpoint(output).resolve()
    if last is None:
        raise ConfigError(f"{name}: {output} holds a run that left no checkpoint to --resume; name a new folder")
    if resume is None:
        raise ConfigError(f"{name}: {output} holds a run; go on with it by --resume {output}, or name a new folder")
    if find_checkpoint(Path(resume)).resolve() != last:
        raise ConfigError(
            f"{name}: {output} holds a run whose last checkpoint is not --resume {resume}; name a new folder"
        )


def check_arm(config: JobConfig, arm: ArmName) -> None:
    """Raises `UnsupportedError`, or `ConfigError`, if this machine lacks what the arm needs, with a remedy."""
    if arm_named(arm).dynamic:
        require_add()
    check_device(config, arm)
    if arm_named(arm).splits:
        from odc.experiments.text.pieces import check_splittable  # loads transformers

        if config.lora and config.lora_dropout:
            raise ConfigError(
                "lora_dropout: the pieces of a split sample would drop otherwise than the whole; set it to 0"
            )
        check_splittable(model_source(config.model))


def model_source(model: str) -> Path:
    """The file or folder that `model` means: a path, or the name of a config that comes with odc."""
    path = Path(model)
    if path.exists():
        return path
    if path.suffix or len(path.parts) > 1:
        raise ConfigError(f"model: there is no file or folder {model}")
    return shipped_config(model)


def unwritten_file(file: Path, name: str) -> None:
    """Checks that `file`, the option `name`, can be written and that no run has written to it."""
    writable_folder(file.resolve().parent, name)
    if file.is_file() and file.stat().st_size:
        raise ConfigError(f"{name}: {file} holds the steps of a run already; name a new file")


def new_file(file: Path, name: str) -> None:
    """Checks that `file`, the option `name`, can be written or replaced; makes its folder if it is missing."""
    if file.is_dir():
        raise ConfigError(f"{name}: {file} is a folder; name a file in it")
    if not file.exists() or (file.is_file() and not file.is_symlink()):
        writable_folder(file.parent, name)


def writable_folder(folder: Path, name: str) -> None:
    """Makes `folder`, the option `name`, if it is missing and checks that a file can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(prefix=_PROBE, dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: cannot write to {folder}: {error.strerror or error}") from error
