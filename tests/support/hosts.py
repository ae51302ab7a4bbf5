"""Hosts on one machine: namespaces joined by a network, and rank processes in them.

A host is a process that does nothing, first in network, IPC, PID, UTS and mount namespaces of its own, with its own
/dev/shm, /sys and hostname. Nothing has a name outside: when the tests end, however they end, the process loses its
standard input and ends too, and the kernel takes the namespaces, everything that runs in them and the devices away.
Addresses exist inside only. Hosts are joined by a bridge in a switch's namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

Made = TypeVar("Made")
PerHost = int | tuple[int, ...]  # ranks of every host, or of each
DEVICE = "eth0"  # of every host, as each has its own
PATIENCE_S = 600.0
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}  # Debian's packages
_NEEDED_CAPABILITIES = {12: "NET_ADMIN", 21: "SYS_ADMIN"}
_HOST = "unshare --ipc --uts --mount --mount-proc"
_APART = {"-n": "--net", "-p": "--pid --fork --kill-child"}  # of unshare, by the options of nsenter that join instead
_MOUNTS = "mount -t tmpfs shm /dev/shm && mount -t sysfs sysfs /sys && hostname {name} && echo ready && exec cat"
NETWORK, IPC, PIDS, UTS, MOUNTS = 0x40000000, 0x08000000, 0x20000000, 0x04000000, 0x00020000
EVERYTHING = NETWORK | IPC | PIDS | UTS | MOUNTS
_DELAY = Path(__file__).with_name("delay.py")


def unavailable() -> str | None:
    """Why hosts cannot be made here and what would help, or None if they can."""
    if os.geteuid() != 0:
        return "hosts need root, to make network namespaces"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        packages = sorted({_TOOLS[tool] for tool in missing})
        return f"hosts need {', '.join(missing)}: apt-get install {' '.join(packages)}"
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = int(status["CapEff"], 16)
    lacking = [name for bit, name in _NEEDED_CAPABILITIES.items() if not held >> bit & 1]
    return f"hosts need the capabilities {', '.join(lacking)} (docker run --privileged)" if lacking else None


def need_hosts() -> None:
    """Skip the test where hosts cannot be made; in CI that is a failure (see `support.skips`)."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)


class Namespaces:
    """A process that holds namespaces, made by `command`, until `close`. `pid` is its number outside."""

    def __init__(self, command: str, program: str) -> None:
        self._process = subprocess.Popen(
            [*command.split(), "sh", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        printed = self._process.stdout.readline()
        if printed != b"ready\n":
            printed += self._process.stdout.read()
            self.close()
            raise OSError(f"no namespaces ({command}): {printed.decode()}")
        pid = self._process.pid
        self.pid = int((children(pid) or [pid])[0])  # unshare has forked, or become the program

    def start(self, command: Sequence[str], kinds: str = "-n", **options: Any) -> subprocess.Popen[Any]:
        """Start a command in the namespaces that the options `kinds` of nsenter name."""
        return subprocess.Popen(["nsenter", "-t", str(self.pid), *kinds.split(), "--", *command], **options)

    def call(self, *lines: str, tool: str = "ip") -> None:
        """Have `ip` or `tc` do these lines in the network namespace."""
        with self.start([tool, "-batch", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            _, errors = process.communicate("\n".join(lines) + "\n", timeout=60)
        if process.returncode:
            raise OSError(f"{tool} {lines}: {errors}")

    def close(self) -> None:
        """End all processes in the namespaces."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # it ends, and with the first process of a namespace all others
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Host(Namespaces):
    """One host. Its `device` has the address `address`. A container beside the host `first` is in those namespaces of
    it that `shared` names, by options of nsenter (-n, -p); with -n, `device` and `address` are those of `first`.
    """

    def __init__(self, number: int, first: Host | None = None, shared: str = "") -> None:
        self.number, self.name, self.device = number, f"host{number}", DEVICE
        joined = shared.split()
        self.wired = "-n" not in joined
        self.address = f"10.68.0.{number + 1}" if self.wired else first.address
        join = f"nsenter -t {first.pid} {shared} " if joined else ""
        apart = " ".join(words for kind, words in _APART.items() if kind not in joined)
        super().__init__(f"{join}{_HOST} {apart}", _MOUNTS.format(name=self.name))

    def environment(self) -> dict[str, str]:
        """What a rank on this host must have set, beside what torchrun sets."""
        return {"GLOO_SOCKET_IFNAME": self.device, "TP_SOCKET_IFNAME": self.device}

    def command(self, *command: str, env: Mapping[str, str] = {}, **options: Any) -> subprocess.Popen[str]:
        """Start a command as on that host; what it prints is read from the process that is returned."""
        merged = {**os.environ, **self.environment(), **env}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        where = f"-n -i -p -u -m --wd={os.getcwd()}"
        return self.start(command, where, text=True, env=merged, **{**streams, **options})

    def within(self, function: Callable[[], Made]) -> Made:
        """Call a function on a thread in the host's network; sockets that it makes stay there, on any thread."""
        with ThreadPoolExecutor(1, initializer=enter_namespaces, initargs=(self.pid, NETWORK)) as thread:
            return thread.submit(function).result()

    def counted(self) -> tuple[int, int]:
        """Bytes that the device has sent and received, as it counts them, with all headers."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.device:
                fields = numbers.split()
                return int(fields[8]), int(fields[0])
        raise OSError(f"{self.name} has no {self.device}")

    def processes(self) -> list[int]:
        """Processes on the host, as they are numbered outside, without the one that holds it."""
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == mine:
                    found.append(int(entry.name))
        return sorted(set(found) - {self.pid})


class Hosts:
    """`count` hosts around a switch, which may be containers of the first that are `shared` (see `Host`). Close it:
    everything in them ends.
    """

    def __init__(self, count: int, shared: str = "") -> None:
        self._open = contextlib.ExitStack()
        self._delay: subprocess.Popen[bytes] | None = None
        self._store: Any = None
        try:
            self._switch = self._keep(Namespaces("unshare --net", "echo ready && exec cat"))
            self._switch.call("link add br0 type bridge", "link set br0 up", "link set lo up")
            self.hosts = [self._keep(Host(0))]
            self.hosts += [self._keep(Host(number, self.hosts[0], shared)) for number in range(1, count)]
            for host in filter(lambda host: host.wired, self.hosts):
                port = f"port{host.number}"
                self._switch.call(
                    f"link add {port} type veth peer name {host.device} netns {host.pid}",
                    f"link set {port} master br0 addrgenmode none up",
                )
                host.call(
                    "link set lo up",
                    f"link set {host.device} addrgenmode none up",
                    f"addr add {host.address}/24 dev {host.device}",
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def __len__(self) -> int:
        return len(self.hosts)

    def _keep(self, made: Any) -> Any:
        self._open.callback(made.close)
        return made

    def close(self) -> None:
        """End whatever runs on the hosts, and them; idempotent."""
        self._store = None
        self.undelay()
        self._open.close()

    # the network -------------------------------------------------------------------------------------------------

    def _ends(self, host: Host) -> tuple[tuple[Namespaces, str], ...]:
        return (host, host.device), (self._switch, f"port{host.number}")

    def shape(self, rate: str = "1gbit", burst: str = "512kb") -> None:
        """Limit every host to `rate`, each way (10gbit needs bursts of 4mb)."""
        for host in self.hosts:
            for end, device in self._ends(host):
                end.call(f"qdisc replace dev {device} root tbf rate {rate} burst {burst} latency 100ms", tool="tc")

    def unshape(self) -> None:
        """Take the limits away."""
        for host in self.hosts:
            for end, device in self._ends(host):
                with contextlib.suppress(OSError):  # it has none
                    end.call(f"qdisc del dev {device} root", tool="tc")

    def drop(self, number: int) -> None:
        """Lose every packet from and to a host in the switch, where neither end notices."""
        self._switch.call(f"link set port{number} nomaster")

    def undrop(self, number: int) -> None:
        """Pass the host's packets again, without a delay."""
        self._switch.call(f"link set port{number} master br0 addrgenmode none up")

    def delay(self, microseconds: int) -> None:
        """Let every packet between host 0 and the others take this much longer each way (this kernel has no netem)."""
        self.undelay()
        command = [sys.executable, "-S", str(_DELAY), "near", "far", str(microseconds)]
        self._delay = self._switch.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._delay.stdout is not None
        if self._delay.stdout.readline() != b"ready\n":
            raise OSError("the delay did not start")
        others = [f"link set port{host.number} master br1" for host in self.hosts[1:]]
        ends = [
            f"link set {end} master {bridge} addrgenmode none up" for end, bridge in (("near", "br0"), ("far", "br1"))
        ]
        self._switch.call("link add br1 type bridge", "link set br1 up", *ends, *others)

    def undelay(self) -> None:
        if self._delay is not None:
            process, self._delay = self._delay, None
            with process:
                self._switch.call(
                    *(f"link set port{host.number} master br0" for host in self.hosts[1:]), "link del br1"
                )
                process.kill()

    # ranks -------------------------------------------------------------------------------------------------------

    def store(self) -> Any:
        """A store on host 0, hosted by this process, that every host reaches; it survives any rank."""
        if self._store is None:
            self._store = self.new_store()
        return self._store

    def new_store(self) -> Any:
        """As `store`, for one job; it is there until it is dropped."""
        import torch.distributed as dist

        stores: Any = dist
        first, timeout = self.hosts[0], timedelta(seconds=PATIENCE_S)
        return first.within(
            lambda: stores.TCPStore(first.address, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        )

    def rank_environment(self, rank: int, per_host: PerHost) -> dict[str, str]:
        """What torchrun would set for a rank, and the interface that gloo must use."""
        places = places_of(per_host, len(self.hosts))
        number, local_rank = places[rank]
        host = self.hosts[number]
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_WORLD_SIZE": str([one for one, _ in places].count(number)),
            "GROUP_RANK": str(host.number),
            "GROUP_WORLD_SIZE": str(len(self.hosts)),
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(self.store().port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **host.environment(),
        }

    def torchrun(
        self, per_host: int, *program: str, env: Mapping[str, str] = {}, each: Sequence[Sequence[str]] = ()
    ) -> list[subprocess.Popen[str]]:
        """Start `torchrun` with `program` on every host, as a user does; one process a host. `each` has more words."""
        started = []
        for host in self.hosts:
            where = ["--nnodes", len(self.hosts), "--node-rank", host.number, "--nproc-per-node", per_host]
            where += ["--master-addr", self.hosts[0].address, "--master-port", 29511]
            command = (sys.executable, "-m", "torch.distributed.run", *map(str, where), *program)
            command += tuple(each[host.number]) if each else ()
            started.append(host.command(*command, env={"OMP_NUM_THREADS": "1", **env}))
        return started


def places_of(per_host: PerHost, hosts: int) -> list[tuple[int, int]]:
    """(host, number there) of each rank, where every host has `per_host` ranks, or each its own number."""
    counts = (per_host,) * hosts if isinstance(per_host, int) else per_host
    return [(host, number) for host, count in enumerate(counts) for number in range(count)]


class Part:
    """`count` hosts from `first` on, as all there are to a job."""

    def __init__(self, hosts: Hosts, first: int, count: int) -> None:
        self._hosts, self._first, self._count = hosts, first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Host:
        return self._hosts[self._first + number]

    def rank_environment(self, rank: int, per_host: int) -> dict[str, str]:
        found = self._hosts.rank_environment(self._first * per_host + rank, per_host)
        world = {"RANK": rank, "GROUP_RANK": rank // per_host, "WORLD_SIZE": per_host * self._count}
        return {**found, **{name: str(number) for name, number in world.items()}, "GROUP_WORLD_SIZE": str(self._count)}


def children(pid: int) -> list[int]:
    """Children of a process's main thread."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def enter_namespaces(pid: int, kinds: int = EVERYTHING) -> None:
    """Move this thread into the namespaces of process `pid`; Python has no call for it before 3.12.

    The PID namespace holds for children only; MOUNTS need a process of one thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.pidfd_open(pid)
    try:
        if libc.setns(fd, kinds) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)
