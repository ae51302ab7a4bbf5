"""All settings of the runtime, in one frozen, validated dataclass. Nothing is read from the environment."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Accumulate = Literal["server", "direct"]
ACCUMULATE_MODES: tuple[Accumulate, ...] = ("server", "direct")
Kernels = Literal["auto", "torch", "triton"]
KERNELS: tuple[Kernels, ...] = ("auto", "torch", "triton")
SumsDtype = Literal["accumulator", "bfloat16", "int8"]
SUMS_DTYPES: tuple[SumsDtype, ...] = ("accumulator", "bfloat16", "int8")
Changes = Literal["auto", "off", "on"]
CHANGES: tuple[Changes, ...] = ("auto", "off", "on")
EngineName = Literal["auto", "sockets", "nixl"]
ENGINES: tuple[EngineName, ...] = ("auto", "sockets", "nixl")
MemoryName = Literal["driver", "nvshmem"]
MEMORIES: tuple[MemoryName, ...] = ("driver", "nvshmem")
OptimizerSharding = Literal["mesh", "world"]  # of `fully_shard`
LOST_AFTER_S = 2.3  # between the second and the third of the probes that a link sends every second
LONGEST_LOST_AFTER_S = 3600.0
LONGEST_TIMEOUT_S = 10 * 365 * 24 * 3600.0  # the operating system's timers overflow not far beyond a hundred years


@dataclass(frozen=True)
class Settings:
    """Settings of one root. All ranks give the same: those by which heaps are laid out and sums are made are checked
    when ranks attach to each other's heaps, the others (timeouts, prefetching, kernels, the engine) are not.

    Args:
        reproducible: fp64 accumulators, so that the arrival order of pushes practically never changes a bit
            (about 2^-29 per element); doubles the accumulator's memory.
        accumulate: who adds a pushed gradient. "server": the owner's daemon, from bounded staging slots, except over
            hosts in CPU memory, where it is as "direct": the pushing rank, under a robust lock in the owner's heap; on
            devices whose atomic adds reach every peer, by those and without the lock.
        timeout_s: seconds a wait may last without progress of the peer it waits for; finite.
        prefetch: units fetched ahead of use (0: fetch when reached).
        push_overlap: push on a sender thread during backward (False: push before backward continues).
        staging_block_bytes: largest block of one staged push, in bytes. None: 1 MiB on the CPU, where a block is added
            while the next one is copied; on a device all that one push brings to an owner, up to half of the ring's
            part of 896 MiB, which all rings into a rank share.
        copy_engine_bytes: on a device, pieces of peers' memory from this size on go by the copy engine, smaller ones
            and this rank's own by a kernel.
        queue_bytes: bytes of each rank's heap for the microbatches it offers in one minibatch (`model.claim`); 0 means
            that there is no queue. Needs libatomic.
        second_buffer: also keep the previously published version, so that readers outside the job (`odc.handover`) have
            a whole step to fetch it. Doubles the memory of the published shard.
        gradient_views: `.grad` lies in the accumulator and takes no memory of its own. The next minibatch or evaluation
            writes there: what is still a parameter's `.grad` then is copied first, any other view of it is not (zero
            gradients with `set_to_none=True`, and copy what you keep). Needs gradients in the accumulator's dtype, and
            one owner of each shard.
        stale_check: at each root forward in an open minibatch, compare this rank's shards with the published ones. On a
            device the error comes at the minibatch's end (docs/gpu.md).
        trace: record spans (see `odc.trace`); False turns off the recorder of the whole process.
        address: of this host, where the job's other hosts reach it; "" takes the interface by which the job's
            key-value store is reached. May differ between ranks. In a job on one host an address has ranks listen there
            for readers of exported weights on other hosts; "", and the four that follow, are ignored.
        ports: first and last port of a range in which each rank listens for other hosts, at one port each; None lets
            the system choose.
        secret_file: path of a file, with the same content on every host, whose bytes a process must know to be admitted
            by the job's other hosts; "" relies on the job's store alone.
        lost_after_s: seconds after which a host that answers nothing ends the job, 1 to 3600; shorter interruptions of
            the network are waited for. What a rank's models share follows the first that it shards with `settings`.
        sums_dtype: of a host's gradients for an owner on another host, which are added up in the accumulator's dtype:
            "bfloat16" rounds each sum once before it crosses the network; "int8" sends matrices in 8 bits, and adds
            what rounding takes off a sum to the next one (on devices by odc's kernels; see docs/int8.md).
        changes: whether other hosts read only what has changed of a shard since they read it last, without loss, and
            so do readers there: "auto" in a job over hosts, where it is faster, as measured, and of units without a
            change nothing; "on" always, on one host as well; by numba. On devices odc's kernels pack, and without them
            "auto" reads as "off".
        engine: what reads shards and sums from other hosts; "auto" chooses, and with memory="nvshmem" that is NVSHMEM.
        memory: where the data of models on devices lies: "driver", in memory of CUDA's driver, or "nvshmem", in
            NVSHMEM's, which every rank of the job then starts when it first runs a model (see docs/gpu.md).
        nvshmem_bytes: what NVSHMEM allocates on each rank at its start, once and for all models of the job; at least as
            much as the first model that a rank runs needs, so 0 does for one model.
        kernels: what moves data: "torch"'s copies and adds, or the "triton" kernels of `odc.kernels`, which run on CPU
            memory only in triton's interpreter (for tests; see docs/gpu.md). "auto": on a device the kernels where
            triton is installed, else torch.
        check_protocol: raise AssertionError when this rank stores a word of the protocol too early, or a value that
            falls (see docs/words.md). For tests: every store then loads the words that it depends on.
    """

    reproducible: bool = False
    accumulate: Accumulate = "server"
    timeout_s: float = 600.0
    prefetch: int = 1
    push_overlap: bool = True
    staging_block_bytes: int | None = None
    copy_engine_bytes: int = 1 << 20
    queue_bytes: int = 0
    second_buffer: bool = False
    gradient_views: bool = False
    stale_check: bool = True
    trace: bool = True
    kernels: Kernels = "auto"
    address: str = ""
    ports: tuple[int, int] | None = None
    secret_file: str = ""
    sums_dtype: SumsDtype = "accumulator"
    changes: Changes = "auto"
    engine: EngineName = "auto"
    memory: MemoryName = "driver"
    nvshmem_bytes: int = 0
    lost_after_s: float = LOST_AFTER_S
    check_protocol: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                if value == "per_source":
                    raise ValueError("accumulate='per_source' is gone; reproducible=True makes sums repeatable")
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        for one in fields(self):
            kind, value = type(one.default), getattr(self, one.name)
            if kind in _KINDS and not isinstance(value, kind):
                raise ValueError(f"{one.name} must be {_KINDS[kind]}, not {value!r}")
        if self.sums_dtype != "accumulator" and self.reproducible:
            raise ValueError(f"sums_dtype={self.sums_dtype!r} would round the sums that reproducible=True keeps exact")
        if not _is_number(self.timeout_s) or not 0 < self.timeout_s <= LONGEST_TIMEOUT_S:
            raise ValueError(
                f"timeout_s must be a positive number of seconds, at most {LONGEST_TIMEOUT_S:.0f} (ten years), not "
                f"{self.timeout_s!r}"
            )
        if not _is_number(self.lost_after_s) or not 1 <= self.lost_after_s <= LONGEST_LOST_AFTER_S:
            raise ValueError(
                f"lost_after_s must be a number of seconds, 1 to {LONGEST_LOST_AFTER_S:.0f}, not {self.lost_after_s!r}"
            )
        for name, what, least in (
            ("prefetch", "units", 0),
            ("copy_engine_bytes", "bytes", 1),
            ("queue_bytes", "bytes", 0),
            ("nvshmem_bytes", "bytes", 0),
        ):
            if not _is_whole(value := getattr(self, name)) or value < least:
                raise ValueError(f"{name} must be a whole number of {what}, {least} or more, not {value!r}")
        if self.ports is not None and not _is_range(self.ports):
            raise ValueError(
                f"ports must be the first and the last of a range, 1 to 65535, or None, not {self.ports!r}"
            )
        block = self.staging_block_bytes
        if block is not None and (not _is_whole(block) or block < 4096 or block % 64):
            raise ValueError(f"staging_block_bytes must be at least 4096 and a multiple of 64, not {block!r}")

    def fingerprint(self) -> str:
        """The settings that every rank must agree on, as one line of text; part of the heap's layout hash."""
        return ",".join(f"{name}={getattr(self, name)}" for name in sorted(_AGREED))


_CHOICES = {
    "accumulate": ACCUMULATE_MODES,
    "kernels": KERNELS,
    "engine": ENGINES,
    "sums_dtype": SUMS_DTYPES,
    "changes": CHANGES,
    "memory": MEMORIES,
}
_KINDS: dict[type, str] = {bool: "True or False", str: "a string"}
_AGREED = frozenset(
    {
        "reproducible",
        "accumulate",
        "staging_block_bytes",
        "queue_bytes",
        "second_buffer",
        "sums_dtype",
        "changes",
        "memory",
    }
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_range(value: object) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2 or not all(_is_whole(port) for port in value):
        return False
    return bool(1 <= value[0] <= value[1] <= 65535)
