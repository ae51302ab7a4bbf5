"""Notes in the record of a run what the emulated CUDA does not see: words, locks, threads, messages, kernels' accesses.

Nothing of odc is changed: a few of its functions, and triton's interpreter, are wrapped as their modules are imported.
Only what odc's protocol counts on orders two threads here: not that one thread happened to hold a lock of the trace's
recorder before another did.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from recorded import kernels, network, notes, protocol, threads, words

_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "odc.fsdp.collect": protocol.collect,
    "odc.hosts.heaps": network.landings,
    "odc.hosts.sums": threads.locks(HostSums="_rounding", EarlySums="_changing"),
    "odc.memory.atomics": words.atomics,
    "odc.memory.cuda": protocol.cuda_heap,
    "odc.memory.cuda_lanes": protocol.cuda_lanes,
    "odc.memory.mapping": words.mapping,
    "odc.memory.mutex": words.mutex,
    "odc.memory.shm": protocol.shm_heap,
    "odc.movers.cuda": protocol.mover,
    "odc.net.engines.connections": network.connections,
    "odc.net.engines.server": network.server,
    "odc.net.engines.staging": network.staging,
    "odc.net.host_link": network.host_link,
    "odc.protocol.check": words.check,
    "odc.protocol.protocol": protocol.counts,
    "odc.protocol.ring": protocol.ring,
    "odc.worker": threads.worker,
    "socket": network.descriptors,
    "torch.distributed.distributed_c10d": network.barriers,
    "triton.runtime.interpreter": kernels.interpreter,
    "zmq.sugar.socket": network.questions,
}


def install(cuda: ctypes.CDLL) -> None:
    """Wrap what is to be recorded of every module that this process imports, or has imported."""
    notes.open_record(cuda)
    for name in [name for name in _AFTER if name in sys.modules]:
        _AFTER[name](sys.modules[name])
    sys.meta_path.insert(0, _Wrapping())
    threads.threads()


class _Wrapping(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        wrap = _AFTER.get(name)
        if wrap is None:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            wrap(module)

        vars(spec.loader)["exec_module"] = exec_module
        return spec
