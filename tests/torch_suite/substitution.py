"""torch's FSDP2 test harness, changed so that its tests run over odc, on CPU, with one process a rank.

`install()` must run before any of torch's test files is imported: they take names from torch's modules by value.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import fsdp


class Devices:
    """How many devices torch's harness believes in: ranks that the running test needs."""

    count = 2


def device_count() -> int:
    """Stands in for torch's, which finds no accelerator."""
    return Devices.count


def install(*, reference: bool) -> None:
    """Prepare torch for its own tests; with `reference` they run over torch's own `fully_shard`."""
    if not reference:
        _substitute_fully_shard()
    from torch.testing._internal import common_utils

    torch.cpu.device_count = device_count
    torch.accelerator.device_count = lambda: 1 << 10  # a test is skipped where it has more ranks than there are
    if hasattr(common_utils, "_cpu_sleep"):
        torch.cpu._sleep = common_utils._cpu_sleep  # tests that delay a device ask whether it can sleep
    _change_harness(shutdown=_nothing if reference else _shutdown)


@contextlib.contextmanager
def cpu_as_accelerator() -> Iterator[None]:
    """While a test file is imported: some ask for the accelerator's type then, and have no answer for none."""
    theirs = torch.accelerator.current_accelerator
    torch.accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cpu")
    try:
        yield
    finally:
        torch.accelerator.current_accelerator = theirs


def _nothing() -> None:
    return


def _shutdown() -> None:
    import odc

    odc.shutdown()


def _substitute_fully_shard() -> None:
    import torch.distributed._composable.fsdp as composable

    import odc

    theirs = fsdp.fully_shard
    for module in (fsdp, composable, fsdp._fully_shard):
        if getattr(module, "fully_shard", None) is theirs:
            module.fully_shard = odc.fully_shard  # type: ignore[attr-defined]


def _change_harness(shutdown: Callable[[], None]) -> None:
    from torch.testing._internal import common_distributed, common_fsdp

    logging.getLogger(common_distributed.__name__).setLevel(logging.WARNING)  # a line for every process
    common_distributed.skip_if_lt_x_gpu = needs_ranks
    common_fsdp.skip_if_lt_x_gpu = needs_ranks
    base = common_distributed.MultiProcessTestCase
    # A forked rank has imported everything already. The parent has computed nothing, so it has no threads to lose.
    base._spawn_processes = base._fork_processes if hasattr(base, "_fork_processes") else _fork_processes
    base.run_test = _leaving_in_good_order(base.run_test, shutdown)
    common_fsdp.FSDPTestMultiThread = _process_per_rank(common_fsdp.FSDPTest)


def _fork_processes(self: Any) -> None:
    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def _leaving_in_good_order(run_test: Callable[..., None], shutdown: Callable[[], None]) -> Callable[..., None]:
    """Let odc leave the job before torch destroys the process group; a forked process runs no exit handlers."""

    @functools.wraps(run_test)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(1)
        try:
            run_test(self, *args, **kwargs)
            if dist.is_initialized():
                dist.barrier()
        finally:
            shutdown()

    return wrapper


def needs_ranks(ranks: int, *, allow_cpu: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """In place of torch's `skip_if_lt_x_gpu`: notes how many ranks the test needs, and skips nothing."""

    def decorator(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return test(*args, **kwargs)

        wrapper.needed_ranks = ranks  # type: ignore[attr-defined]
        return wrapper

    return decorator


def prepare(test: unittest.TestCase) -> None:
    """Give a test the ranks that it needs, two at least, and no more: some take eight on CPU where two devices do."""
    cls: Any = type(test)
    needed = getattr(getattr(cls, test._testMethodName, None), "needed_ranks", None)
    Devices.count = max(2, needed or 2)
    asked = vars(cls).get("_asked_world_size") or getattr(cls, "world_size", None)
    if isinstance(asked, property) and asked.fget is not None:
        cls._asked_world_size = asked
        fget, most = asked.fget, Devices.count
        cls.world_size = asked if needed is None else property(lambda self: min(fget(self), most))
        Devices.count = max(most, int(cls.world_size.fget(test)))


def _process_per_rank(base: type) -> type:
    """Of torch's `FSDPTest`: in place of a class whose ranks are threads of one process."""

    class FSDPTestMultiThread(base):  # type: ignore[misc, valid-type]
        @property
        def world_size(self) -> int:
            return Devices.count

        def perThreadSetUp(self) -> None:
            torch._dynamo.reset()

        def perThreadTearDown(self) -> None:
            torch._dynamo.reset()

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            self.perThreadSetUp()
            try:
                super().run_test(test_name, parent_pipe)
            finally:
                self.perThreadTearDown()

    return FSDPTestMultiThread


def on_cpu() -> None:
    """Hide GPUs; before torch looks for them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
