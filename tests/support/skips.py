"""Where CI is set, a test may skip for the reasons listed here alone: any other skip is a failure, and is seen."""

from __future__ import annotations

import re

import pytest

#: Patterns of reasons. What a runner of CI lacks otherwise (root, a tool, an extra), it has to be given.
ALLOWED = (
    # There is no device, it is too small, or this is one of the tests of a machine without any.
    r"CUDA device",
    r"of the device|of device memory|two devices|there is a driver|kernels are usable",
    r"nvshmem4py",
    r"^emulated: |^accesses are not recorded: ",
    # It runs elsewhere: in `make test-integrations`, or in the environment without the package.
    r"make test-integrations$|needs NIXL|make test-torch$",
    r"^verl is installed",
    # A cluster's scheduler is no tool of the tests; what it sets is emulated in the tests beside.
    r"^needs Slurm",
    # This torch cannot do it.
    r"FSDP2 of torch \S+ ignores grad_dtype|torch \S+ does not run a module of a unit alone",
    # No package index has a browser, and a network that loses all but one probe is luck.
    r"needs Chromium",
    r"this machine is too busy",
    # `.ci/run` ends in time on a slow runner; the table at its end counts what has not begun.
    r"^no time is left",
)


def refusal(reason: str) -> str | None:
    """Why CI does not let a test skip for this reason, or None if it does."""
    reason = reason.removeprefix("Skipped: ")
    if any(re.search(pattern, reason) for pattern in ALLOWED):
        return None
    return f"CI is set, and no test may skip there for this reason (see tests/support/skips.py): {reason}"


def judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip that CI does not allow into a failure. An expected failure is no skip."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        why = None if hasattr(report, "wasxfail") else refusal(report.longrepr[2])
        if why is not None:
            report.outcome, report.longrepr = "failed", why
