"""Runs the checks, those of one module in a process with a deadline: a probe that hangs or aborts is one line too."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby

from odc.doctor.table import Check

_MARK = "\x1e"  # before each answer, whatever a library prints in between
_PROGRAM = "import sys; from odc.doctor.examination import answer; answer(sys.argv[1:])"
_WITH = {"nvshmem": ("cuda",)}  # what a use needs besides: a library that loads does not make a device


class Missing(Exception):
    """Raised by a probe: what it looks for is not there. Any other error means that it does not work."""


class Broken(Exception):
    """Raised by a probe: what it looks for is there, but does not work or fit."""


class State(StrEnum):
    """State of one thing that was checked."""

    OK = "ok"
    ABSENT = "absent"  # missing, so what needs it cannot run
    BROKEN = "broken"  # present, but does not work or fit


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    state: State
    found: str
    use: str = "run"  # what needs it: "run" (odc at all), another of `USES`, or an extra
    do: str = ""  # what to install or change; empty where all is well


def examine(checks: Sequence[Check]) -> list[Finding]:
    """The findings of all checks, in order. Never raises; keeps the deadlines."""
    modules = [list(group) for _, group in groupby(checks, lambda check: check.probe.split(":")[0])]
    with ThreadPoolExecutor() as pool:
        return [finding for found in pool.map(_examine_module, modules) for finding in found]


def lacking(findings: Iterable[Finding], uses: Iterable[str]) -> list[Finding]:
    """The findings that stand in the way of `uses`."""
    wanted = {one for use in uses for one in (use, *_WITH.get(use, ()))}
    return [finding for finding in findings if finding.use in wanted and finding.state is not State.OK]


def to_json(findings: Iterable[Finding]) -> str:
    """A list of objects with the fields of `Finding`."""
    return json.dumps([asdict(finding) for finding in findings], indent=1)


def answer(probes: Iterable[str]) -> None:
    """Runs probes and prints what each of them finds; called in a process of its own."""
    for probe in probes:
        module, name, *arguments = probe.split(":")
        try:
            state, found = State.OK, getattr(importlib.import_module(module), name)(*arguments)
        except Missing as error:
            state, found = State.ABSENT, str(error)
        except Broken as error:
            state, found = State.BROKEN, str(error)
        except Exception as error:
            state, found = State.BROKEN, f"{type(error).__name__}: {error}"
        print(_MARK + json.dumps([state, found]), flush=True)


def _examine_module(checks: list[Check]) -> list[Finding]:
    """Starts a further process after each check that hung or ended the last one."""
    findings: list[Finding] = []
    while len(findings) < len(checks):
        remaining = checks[len(findings) :]
        answers, failure = _run([check.probe for check in remaining], max(check.deadline_s for check in remaining))
        if len(answers) < len(remaining):
            answers.append((State.BROKEN, failure))
        findings += [
            Finding(check.what, state, found, check.use, "" if state is State.OK else check.advice)
            for check, (state, found) in zip(remaining, answers, strict=False)
        ]
    return findings


def _run(probes: list[str], deadline_s: float) -> tuple[list[tuple[State, str]], str]:
    """The answers of a process that runs the probes, and what became of it."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", _PROGRAM, *probes]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s)
        output, last = done.stdout, (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        failure = f"the probe ended with code {done.returncode}: {last}"
    except subprocess.TimeoutExpired as error:
        output, failure = error.stdout or b"", f"no answer in {deadline_s:.0f} s"
    marked = output.decode(errors="replace").split(_MARK)[1:]
    answers = [json.loads(text.splitlines()[0]) for text in marked]
    return [(State(state), found) for state, found in answers], failure
