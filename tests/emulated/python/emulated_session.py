"""What a session of tests over emulated CUDA leaves out, and what it says of itself: a plugin of pytest."""

from __future__ import annotations

import emulated
import pytest

#: By file, or function of a test. The reasons are shown with the results.
CANNOT = {
    "test_a_whole_unit_takes_few_launches": "emulated: launches are counted by CUPTI, which asks a real device",
    "tests/gpu/test_lanes.py": "emulated: a delay is a CUDA kernel; EMULATED_DELAY_US makes streams late here",
    "tests/gpu/test_nvshmem_kernels.py": "emulated: NVSHMEM's device calls are compiled code",
    "tests/gpu/test_kernels.py": "emulated: about compiled kernels; `make test` runs most of it interpreted",
}


def pytest_configure() -> None:
    if emulated.library() is None:
        raise pytest.UsageError("CUDA is not emulated in this process: start it by tests/emulated/run.sh")


def pytest_report_header() -> str:
    cuda = emulated.library()
    protected = "host code that touches its memory dies" if cuda and cuda.emulated_protects() else "NOT PROTECTED"
    return f"CUDA: emulated in host memory (tests/emulated/README.md); memory of the device: {protected}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file, _, test = item.nodeid.partition("::")
        if reason := CANNOT.get(file) or CANNOT.get(test.partition("[")[0]):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.line("the device was emulated: nothing here was compiled for a GPU, or ran on one")
