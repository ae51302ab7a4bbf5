"""Reads by NIXL (UCX): InfiniBand, RoCE, EFA, device memory, and TCP where there is nothing better.

NIXL itself admits any process that has an agent's metadata, so metadata crosses admitted connections only, and its
listener is never on. It does not report deaths either: a read watches the admitted connection to the same rank.

Two defaults are changed, which on processors that train cost much of the speed: the progress thread would spin,
and UCX's TCP segments are small. What the environment sets for UCX stays.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from odc.errors import UnsupportedError, install
from odc.memory import device_links
from odc.net.engines.connections import Answers, Dial
from odc.net.engines.engine import Engine
from odc.net.engines.nearest import address_of, nearest_devices, rdma_devices
from odc.net.engines.pace import Pace
from odc.net.tcp import interface_of
from odc.settings import LOST_AFTER_S, EngineName

MODULES = ("nixl_cu13", "nixl_cu12")
EXTRA = install("nixl")
_PROGRESS_DELAY_US = 100  # the progress thread sleeps in poll until traffic wakes it; 0, the Python API's, spins
_TCP_SETTINGS = {
    "UCX_TCP_TX_SEG_SIZE": "128k",
    "UCX_TCP_RX_SEG_SIZE": "128k",
    "UCX_TCP_SNDBUF": "4m",
    "UCX_TCP_RCVBUF": "4m",
}
_MOST_READS = 16  # of one rank at a time
_DESCRIPTION = struct.Struct("!QQI4s")  # address, bytes, device, kind; NIXL's metadata follows
_log = logging.getLogger(__name__)


def installed() -> str | None:
    """The module of the NIXL that is installed, or None."""
    from importlib.util import find_spec

    return next((name for name in MODULES if find_spec(name) is not None), None)


def set_for_ucx(address: str) -> None:
    """Set what UCX reads when it loads, where the environment does not: TCP's buffers and the devices it may open.

    Without a list UCX listens on every interface, and every rank takes the same RDMA device. `address` is the one at
    which other hosts reach this one. The GPU is the current one, where this process uses any.
    """
    on_gpu = torch.cuda.is_initialized()
    names = nearest_devices(address_of(torch.cuda.current_device())) if on_gpu else rdma_devices()
    devices = [f"{name}:1" for name in names]
    interface = interface_of(address)
    for name, value in _TCP_SETTINGS.items():
        os.environ.setdefault(name, value)
    if interface is not None:
        os.environ.setdefault("UCX_NET_DEVICES", ",".join([*devices, interface]))
    elif devices and "UCX_NET_DEVICES" not in os.environ:
        _log.warning("no interface has %s as its first address, so UCX chooses devices: set UCX_NET_DEVICES", address)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")


def _load(address: str) -> ModuleType:
    import importlib

    module = installed()
    if module is None:
        raise UnsupportedError(f"Settings(engine='nixl') needs NIXL, which is not installed: {EXTRA}")
    set_for_ucx(address)
    try:
        return importlib.import_module(f"{module}._api")
    except (ImportError, OSError) as error:
        raise UnsupportedError(f"Settings(engine='nixl'): {module} does not load: {error}") from error


_making = threading.Lock()


def _agent(api: Any, name: str) -> Any:
    """An agent whose progress thread does not spin; the Python API has no parameter for that."""
    plain = api.nixlBind.nixlAgentConfig

    class Config(plain):  # type: ignore[misc,valid-type]
        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, _PROGRESS_DELAY_US if key == "pthrDelay" else value)

    wanted = api.nixl_agent_config(
        enable_prog_thread=True,
        enable_listen_thread=False,
        backends=["UCX"],
        sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    with _making:
        api.nixlBind.nixlAgentConfig = Config
        try:
            return api.nixl_agent(name, wanted)
        finally:
            api.nixlBind.nixlAgentConfig = plain


@dataclass(frozen=True)
class _Remote:
    """A region of another rank: its agent, and where the region lies in its memory."""

    agent: str
    address: int
    nbytes: int
    device: int
    kind: str


class NixlEngine(Engine):
    """An engine by NIXL, for CPU and CUDA memory. Raises UnsupportedError where NIXL is not installed or loads not.

    A destination within exposed memory needs no registration; any other is registered for the time of the read.
    """

    name, only_into_own = "nixl", True

    def __init__(self, me: int, dial: Dial, timeout_s: float, address: str, lost_after_s: float = LOST_AFTER_S) -> None:
        super().__init__(me, dial, timeout_s, lost_after_s, describe=self._describe, most_connections=_MOST_READS)
        self._pid = os.getpid()
        self._agent = _agent(_load(address), f"odc.{me}.{secrets.token_hex(8)}")
        self._registered: dict[str, tuple[torch.Tensor, Any]] = {}
        self._known: dict[str, dict[int, _Remote]] = {}  # by region and rank, until this rank withdraws its own
        self._lock, self._pace = threading.Lock(), Pace()

    def expose(self, region: str, memory: torch.Tensor) -> None:
        if memory.device.type == "cuda":
            device_links.flushes_writes(memory.device)  # or it is refused: what is exposed is read into as well
        super().expose(region, memory)
        try:
            self._registered[region] = memory, self._register(region, memory)
        except UnsupportedError:
            super().withdraw(region)
            raise

    def _register(self, region: str, memory: torch.Tensor) -> Any:
        """NIXL's registration of memory that is, or is filled from, a region."""
        try:
            return self._agent.register_memory([_place(memory)], _kind(memory))
        except Exception as error:  # NIXL's own errors share no base
            raise UnsupportedError(
                f"rank {self.me}: NIXL cannot register {memory.numel()} bytes of {memory.device} for {region!r} "
                f"({error}); Settings(engine='sockets') reads them too"
            ) from error

    def withdraw(self, name: str) -> None:
        super().withdraw(name)
        self._known.pop(name, None)
        found = self._registered.pop(name, None)
        if found is not None and os.getpid() == self._pid:
            self._agent.deregister_memory(found[1])

    def _describe(self, region: str) -> bytes:
        memory, registration = self._registered[region]
        where = _DESCRIPTION.pack(memory.data_ptr(), memory.numel(), _device(memory), _kind(memory).encode())
        return where + bytes(self._agent.get_partial_agent_metadata(registration, inc_conn_info=True))

    def _begin(
        self, answers: Answers, region: str, offset: int, into: torch.Tensor, resources: contextlib.ExitStack
    ) -> Callable[[], bool]:
        remote = self._known.get(region, {}).get(answers.rank) or self._ask(answers, region)
        if offset + into.numel() > remote.nbytes:
            return lambda: False
        if not into.numel():
            return lambda: True
        resources.enter_context(self._registration_of(region, into))
        handle = self._transfer(answers, remote, offset, into, resources)
        return functools.partial(self._await, answers, handle, into, time.monotonic())

    def _ask(self, answers: Answers, region: str) -> _Remote:
        """The rank's description of its region."""
        described = self._description(answers, region)
        if len(described) < _DESCRIPTION.size:
            raise UnsupportedError(
                f"rank {self.me}, reading {answers.what} of rank {answers.rank}: it does not read by NIXL; install it "
                f"there too ({EXTRA}), or set Settings(engine='sockets') on every rank"
            )
        address, nbytes, device, kind = _DESCRIPTION.unpack_from(described)
        with _failing(answers), self._lock:
            agent = self._agent.add_remote_agent(described[_DESCRIPTION.size :])
        name = agent.decode() if isinstance(agent, bytes) else str(agent)
        remote = _Remote(name, address, nbytes, device, kind.decode())
        self._known.setdefault(region, {})[answers.rank] = remote
        return remote

    def _transfer(
        self, answers: Answers, remote: _Remote, offset: int, into: torch.Tensor, resources: contextlib.ExitStack
    ) -> Any:
        """Begin the transfer; returns NIXL's handle, which goes with `resources`."""
        agent = self._agent
        with _failing(answers):
            source = [(remote.address + offset, into.numel(), remote.device)]
            ours = agent.get_xfer_descs([_place(into)[:3]], _kind(into))
            theirs = agent.get_xfer_descs(source, remote.kind)
            handle = agent.initialize_xfer("READ", ours, theirs, remote.agent)
            resources.callback(self._release, handle)
            agent.transfer(handle)
        return handle

    def _release(self, handle: Any) -> None:
        with contextlib.suppress(Exception):  # of a transfer that failed, or goes on: NIXL gives it up later
            self._agent.release_xfer_handle(handle)

    def _await(self, answers: Answers, handle: Any, into: torch.Tensor, begun: float) -> bool:
        """Return when a transfer is done that was `begun` then. Sleeps until it is due; from then on, it polls."""
        due = self._pace.due(answers.rank, into.numel(), begun)
        state = answers.outcome(lambda: self._ended(answers, handle), due)
        if state != "DONE":
            raise answers.lost(f"NIXL says {state}")
        self._pace.ended(answers.rank, into.numel(), begun)
        if into.device.type == "cuda" and device_links.flushes_writes(into.device):
            device_links.flush_writes(into.device)
        return True

    def _ended(self, answers: Answers, handle: Any) -> str | None:
        """The state in which a transfer has ended; None while it goes on."""
        with _failing(answers):
            state = str(self._agent.check_xfer_state(handle))
        return None if state == "PROC" else state

    @contextlib.contextmanager
    def _registration_of(self, region: str, into: torch.Tensor) -> Iterator[None]:
        begin, end = into.data_ptr(), into.data_ptr() + into.numel()
        for memory, _ in list(self._registered.values()):
            if memory.data_ptr() <= begin and end <= memory.data_ptr() + memory.numel():
                yield
                return
        registration = self._register(region, into)
        try:
            yield
        finally:
            self._agent.deregister_memory(registration)

    def close(self) -> None:
        super().close()
        if os.getpid() == self._pid:
            for region in list(self._registered):
                self.withdraw(region)


@contextlib.contextmanager
def _failing(answers: Answers) -> Iterator[None]:
    """NIXL's own errors, which share no base, as the loss of the rank that is read."""
    try:
        yield
    except Exception as error:
        raise answers.lost(f"{type(error).__name__}: {error}") from error


def _place(memory: torch.Tensor) -> tuple[int, int, int, str]:
    return memory.data_ptr(), memory.numel(), _device(memory), ""


def _device(memory: torch.Tensor) -> int:
    return memory.device.index or 0 if memory.device.type == "cuda" else 0


def _kind(memory: torch.Tensor) -> str:
    return "VRAM" if memory.device.type == "cuda" else "DRAM"


def choose_engine(wanted: EngineName) -> EngineName:
    """The engine that `wanted` comes to on this host: "nixl" where there is an RDMA device, else "sockets".

    Raises UnsupportedError where NIXL is wanted and not installed. Every host of a job should come to the same one.
    """
    if wanted == "nixl":
        if installed() is None:
            raise UnsupportedError(f"reading from other hosts by NIXL, which is not installed here: {EXTRA}")
        return "nixl"
    devices = rdma_devices() if wanted == "auto" else []
    if devices and installed() is None:
        _log.warning("this host has RDMA (%s), but NIXL is not installed: plain TCP is used (%s)", devices[0], EXTRA)
    return "nixl" if devices and installed() is not None else "sockets"
