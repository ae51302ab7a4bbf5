"""The entry point, as verl sees it in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.verl import import_verl, needs_verl

pytestmark = needs_verl


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VERL_PLATFORM": "cpu", **environment}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_verl_finds_engines_and_platform_with_nothing_set() -> None:
    program = """
import sys, verl
assert "odc.integrations.verl.plugin" in sys.modules, "verl has not loaded the entry point"
from verl.plugin.platform import get_platform
from verl.workers.engine import EngineRegistry
engines = [EngineRegistry.get_engine_cls(kind, "odc").__name__ for kind in ("language_model", "value_model")]
print(get_platform().current_device(), *engines)
"""
    done = run("-c", program)
    assert done.stdout.split() == ["cpu", "OdcEngineWithLMHead", "OdcEngineWithValueHead"], done.stderr


DOCTOR = """
from odc.doctor.packages import verl_plugin
try:
    print("OK", verl_plugin())
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_the_doctor_names_the_engines() -> None:
    done = run("-c", DOCTOR)
    assert done.stdout.startswith("OK verl 0.9"), done.stderr
    assert "strategy odc for language_model and value_model" in done.stdout


def test_the_doctor_names_what_failed() -> None:
    program = """
import sys
sys.modules["odc.integrations.verl.rebalance"] = None
import verl  # goes on without the plugin
"""
    done = run("-c", program + DOCTOR)
    assert done.stdout.startswith("Broken: ") and "does not load: ModuleNotFoundError: " in done.stdout, done.stderr


def test_the_platform_is_never_detected_by_itself() -> None:
    import_verl()
    from verl.plugin.platform.platform_manager import PlatformRegistry

    platform = PlatformRegistry.get("cpu")()
    assert platform.is_available() and not platform.is_platform_available(use_smi_check=True)


@pytest.mark.parametrize("name", ["memory_allocated", "empty_cache", "synchronize", "get_rng_state", "mem_get_info"])
def test_what_verl_calls_on_a_device_is_there(name: str) -> None:
    import_verl()
    from odc.integrations.verl.cpu_platform import CpuPlatform

    getattr(CpuPlatform().device_module, name)()
