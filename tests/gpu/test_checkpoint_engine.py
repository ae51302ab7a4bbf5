"""Weights for a process with checkpoint-engine's own receiver, which maps the sender's bucket by CUDA IPC."""

from __future__ import annotations

import gc
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.device import own_device
from support.handover_jobs import numbered
from support.ranks import RankPool
from support.waiting import until

from odc import Settings
from odc.errors import StaleVersionError, WaitTimeoutError
from odc.handover import Reader, read_groups, version, weight_handle
from odc.integrations.checkpoint_engine import ReceiverError, send_weights

if torch.cuda.is_available():
    pytest.importorskip("checkpoint_engine", reason="checkpoint-engine is not installed")

Pools = Callable[[int], RankPool]
NBYTES = 4096  # of a group: several of them

RECEIVER = """
import os
import sys
import time
from types import SimpleNamespace

import torch
import zmq
from checkpoint_engine.worker import VllmColocateWorkerExtension, update_weights_from_ipc

address, folder, behaviour = sys.argv[1:]
torch.cuda.set_device(0)
loaded = {}


def load(weights):
    for name, tensor in weights:
        assert tensor.is_cuda
        if name == "second.weight" and behaviour == "refuse":
            raise KeyError(f"this model has no {name}")
        if name == "second.weight" and behaviour == "end":
            os._exit(7)
        while behaviour == "wait" and not os.path.exists(f"{folder}/go"):
            time.sleep(0.01)
        loaded[name] = tensor.clone()  # the bucket is filled anew as soon as this has returned


def finish():
    torch.save({name: tensor.cpu() for name, tensor in loaded.items()}, f"{folder}/received.pt")


def by_vllms_extension():  # with doubles for the two names that it takes of vLLM
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    platform = SimpleNamespace(device_type="cuda", get_device_uuid=lambda index: uuid)
    sys.modules["vllm.platforms"] = SimpleNamespace(current_platform=platform)
    after_loading = SimpleNamespace(process_weights_after_loading=lambda *of_a_model: finish())
    sys.modules["vllm.model_executor.model_loader.utils"] = after_loading

    class Worker(VllmColocateWorkerExtension):
        device, model_config = torch.device("cuda", 0), None
        model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=load))

    Worker().update_weights_from_ipc({uuid: address})


open(f"{folder}/ready", "w").close()
if behaviour == "vllm":
    by_vllms_extension()
else:
    update_weights_from_ipc(zmq.Context(), address, 0, run=load, post_hook=finish)
"""


def receiver(folder: Path, behaviour: str) -> tuple[subprocess.Popen[str], str]:
    """A process that receives weights once and saves them in the folder, and the address that it connects to."""
    address = f"ipc://{folder}/receiver"
    words = [sys.executable, "-c", RECEIVER, address, str(folder), behaviour]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    ready = folder / "ready"
    until(lambda: ready.exists() or process.poll() is not None, "a receiver to begin", within_s=240.0)  # imports torch
    return process, address


def sends_all(rank: int, world: int, folder: str, behaviour: str) -> None:
    model, sharded = numbered(24, own_device(rank), Settings(timeout_s=60.0))
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.normal_(mean=place)
    sharded.publish()
    text, newest = weight_handle(sharded), version(sharded)
    if rank == 0:
        process, address = receiver(Path(folder), behaviour)
        with Reader(text) as reader:
            whole = reader.read(at_least=newest).tensors
            groups = list[int]()

            def counted() -> Iterator[dict[str, torch.Tensor]]:
                for group in read_groups(reader, NBYTES, newest, device=reader.device):
                    groups.append(len(group))
                    yield group

            send_weights(counted(), address, timeout_s=240.0)
        assert process.wait(120) == 0, process.communicate()
        received = torch.load(Path(folder) / "received.pt")
        assert received.keys() == whole.keys() and len(groups) > 2, groups
        wrong = [name for name, one in whole.items() if not torch.equal(received[name], one)]
        assert not wrong, wrong
    dist.barrier()


@pytest.mark.parametrize("behaviour", ["load", "vllm"])
def test_a_receiver_loads_what_the_ranks_have_published(ranks: Pools, tmp_path: Path, behaviour: str) -> None:
    ranks(2).run(sends_all, str(tmp_path), behaviour, timeout=400)


#: What receivers that ended by an error have read. No later test is given its memory: torch counts who has mapped it,
#: and the judge of orders does not see that.
kept: list[dict[str, torch.Tensor]] = []


def ends_by_an_error(rank: int, world: int, folder: str, behaviour: str) -> tuple[str, int, str]:
    """Sends to a receiver that behaves so, or "stale" groups. The sender's error, the receiver's exit code, its log."""
    device, place = own_device(rank), Path(folder)
    model, sharded = numbered(24, device, Settings(timeout_s=60.0))
    model.fill(1)
    sharded.publish()
    process, address = receiver(place, behaviour)

    def groups(reader: Reader) -> Iterator[dict[str, torch.Tensor]]:
        for number, group in enumerate(read_groups(reader, NBYTES, 1, device=device)):
            if number == 1 and behaviour == "stale":
                raise StaleVersionError("version 2 was published")
            kept.append(group)
            yield group

    with Reader(weight_handle(sharded)) as reader:
        sent = groups(reader)
        with pytest.raises((ReceiverError, StaleVersionError, WaitTimeoutError)) as caught:
            send_weights(sent, address, timeout_s=20.0 if behaviour == "wait" else 240.0)
        assert inspect.getgeneratorstate(sent) == inspect.GEN_CLOSED, "what it had begun to read"
    (place / "go").touch()
    _, stderr = process.communicate(timeout=120)
    assert not (place / "received.pt").exists()
    return f"{type(caught.value).__name__}: {caught.value}", process.returncode, stderr


@pytest.mark.parametrize(
    ("behaviour", "sender", "other"),
    [
        ("refuse", "asked to load second.weight.*this model has no second.weight", "RuntimeError: ReceiverError: the"),
        ("stale", "StaleVersionError: version 2 was published", "RuntimeError: StaleVersionError: version 2"),
        ("wait", "WaitTimeoutError: no receiver at .* within 20 s", "RuntimeError: WaitTimeoutError: no receiver at"),
        ("end", "has ended and not answered when asked to load second.weight", ""),
    ],
)
def test_an_error_of_either_end_ends_both_and_says_why(
    ranks: Pools, tmp_path: Path, behaviour: str, sender: str, other: str
) -> None:
    [(error, code, stderr)] = ranks(1).run(ends_by_an_error, str(tmp_path), behaviour, timeout=400)
    assert re.search(sender, error, re.DOTALL), error
    assert code == (7 if behaviour == "end" else 1) and other in stderr, (code, stderr)


def test_a_receiver_that_never_connects_is_named(device: torch.device, tmp_path: Path) -> None:
    """And what was to be sent is given back."""
    address, before = f"ipc://{tmp_path}/receiver", torch.cuda.memory_allocated(device)
    with pytest.raises(WaitTimeoutError, match=rf"no receiver at {address} has connected within 0.3 s"):
        send_weights(iter([{"weight": torch.ones(1 << 20, device=device)}]), address, timeout_s=0.3)
    gc.collect()
    assert torch.cuda.memory_allocated(device) == before


def test_tensors_outside_the_bucket_are_refused(device: torch.device, tmp_path: Path) -> None:
    one = torch.ones(4, 4, device=device)
    for other in (torch.ones(3, device=device), one.T[:2]):
        with pytest.raises(ValueError, match="other is not contiguous, or not in the storage of the first"):
            send_weights([{"weight": one, "other": other}], f"ipc://{tmp_path}/receiver", timeout_s=0.3)
