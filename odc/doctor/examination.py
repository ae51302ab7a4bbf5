"""All probes, each in a separate process with a deadline: one that hangs or aborts is a line of the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from odc.doctor.finding import Finding, State, broken
from odc.doctor.packages import names_of_extras

_MARK = "\x1e"  # before the answer, whatever a library prints first
_AT_ONCE = 4
_PROGRAM = """
import importlib, json, sys
from dataclasses import asdict
module, _, name = sys.argv[1].partition(":")
found = getattr(importlib.import_module(module), name)()
print("\\x1e" + json.dumps([asdict(one) for one in found]), flush=True)
"""
#: What findings are needed for, and what that means.
USES = {
    "run": "odc on this host's processors",
    "cuda": "odc on GPUs of one host",
    "nvshmem": "GPUs beyond one host's NVLink",
    "kernels": "odc's own Triton kernels",
    "network": "ranks on several hosts",
    "rdma": "InfiniBand, RoCE, EFA or device memory between hosts",
    "queue": "queue_bytes: one queue of microbatches for all ranks",
    "loaders": "data loaders with workers",
    "verl": "reinforcement learning with verl",
}
_WITH = {"nvshmem": ("cuda",)}  # what a use needs besides: a library that loads does not make a device


@dataclass(frozen=True)
class Probe:
    """Something to look at."""

    what: str  # its name, if it says nothing itself
    function: str  # "module:function"; takes nothing, returns findings
    use: str = "run"  # what needs it
    deadline_s: float = 120.0  # after which it counts as hanging
    hangs: str = "try again when the machine is less busy; if it hangs again, report it"  # what to do then


PROBES: tuple[Probe, ...] = (
    Probe("system", "odc.doctor.packages:system"),
    Probe("torch", "odc.doctor.packages:torch_itself"),
    Probe("shared memory", "odc.doctor.host:memory"),
    Probe("robust mutex", "odc.doctor.host:mutex", hangs="robust mutexes do not work in this sandbox; use another"),
    Probe("peers", "odc.doctor.host:peers"),
    Probe("driver", "odc.doctor.gpu:driver", "cuda", hangs="the driver hangs: see dmesg, reset the device or reboot"),
    Probe("torch on CUDA", "odc.doctor.gpu:torch_cuda", "cuda", hangs="the driver hangs: see dmesg, reset the device"),
    Probe("Triton", "odc.doctor.gpu:triton", "kernels"),
    Probe("NVSHMEM", "odc.doctor.gpu:nvshmem", "nvshmem", hangs="NVSHMEM's library hangs while it loads"),
    Probe("network", "odc.doctor.network:network", "network", hangs="NIXL's library hangs while it loads"),
    Probe("extras", "odc.doctor.packages:extras", "extras"),
    Probe("verl plugin", "odc.doctor.packages:verl_plugin", "verl", 240.0, "importing verl hangs"),
)


def examine(probes: Sequence[Probe] = PROBES) -> list[Finding]:
    """Runs all probes, a few at a time, and returns their findings in order. Never raises; keeps the deadlines."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [finding for found in pool.map(_run, probes) for finding in found]


def known_uses() -> set[str]:
    """The uses that findings may be needed for."""
    return {*USES, *names_of_extras()}


def lacking(findings: Iterable[Finding], uses: Iterable[str]) -> list[Finding]:
    """The findings that stand in the way of `uses`."""
    wanted = {one for use in uses for one in (use, *_WITH.get(use, ()))}
    return [finding for finding in findings if finding.use in wanted and finding.state is not State.OK]


def _run(probe: Probe) -> list[Finding]:
    begin = time.monotonic()
    command = [sys.executable, "-P", "-W", "ignore", "-c", _PROGRAM, probe.function]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=probe.deadline_s
        )
    except subprocess.TimeoutExpired:
        return [broken(probe.what, f"no answer in {time.monotonic() - begin:.0f} s", probe.hangs, probe.use)]
    _, mark, answer = done.stdout.rpartition(_MARK)
    if not mark:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        said = f"the probe ended with code {done.returncode}: {last}"
        return [broken(probe.what, said, "report it, with the output of `odc --traceback doctor`", probe.use)]
    return [Finding(**{**one, "state": State(one["state"])}) for one in json.loads(answer)]


def to_json(findings: Iterable[Finding]) -> str:
    """A list of objects with the fields of `Finding`."""
    return json.dumps([asdict(finding) for finding in findings], indent=1)
