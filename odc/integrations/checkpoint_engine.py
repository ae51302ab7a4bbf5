"""Weights for inference workers that have the receiver of checkpoint-engine, as vLLM and SGLang have it.

checkpoint-engine (Moonshot AI) updates a running engine by its `ParameterServer`, which holds a copy of all weights.
Here the copy is what the ranks of a job have published. The receivers stay as they are: `update_weights_from_ipc` of
`checkpoint_engine.worker`, which vLLM calls in `VllmColocateWorkerExtension`, and SGLang in an extension of its own.

The sender asks and the receiver answers, over ZeroMQ; each message is pickled, each answer empty or an error's text:

1. how to map the bucket, a tensor of bytes on the GPU that both use;
2. of each group of tensors their names, shapes, dtypes and places in the bucket, answered when they are loaded;
3. None: the bucket is unmapped; and None again, after which the receiver finishes the weights and ends.

In place of 2 and 3 an exception ends the receiver, which raises it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from odc.errors import OdcError, UnsupportedError, WaitTimeoutError, install

_NOTICE_MS = 1000  # for the message that ends a receiver to be on its way


class ReceiverError(OdcError):
    """A receiver could not map or load what it was given; the message has its own report."""


def send_weights(groups: Iterable[Mapping[str, torch.Tensor]], address: str, *, timeout_s: float = 600.0) -> None:
    """Hand all tensors to the one receiver that connects to `address`; returns when it has loaded and finished them.

    Args:
        groups: {name: tensor}, of one storage on the receiver's GPU, as `odc.handover.read_groups` yields them: a group
            is good until the next is asked for, and the next is read while the receiver loads this one.
        address: of ZeroMQ, that the receiver is given for its GPU, such as "ipc://@odc-weights-0". It is bound here.
        timeout_s: how long an answer may take. The first includes the receiver's start, each other the load of a group.

    May be called by any thread, for several receivers from as many threads, each with groups of its own.

    Raises UnsupportedError if the tensors are not on a GPU, or pyzmq is missing; ReceiverError if the receiver reports
    an error, or ends; WaitTimeoutError if an answer is late; whatever `groups` raises, such as StaleVersionError. Then
    the receiver ends, too, as soon as it has loaded what it loads, and its weights are a mixture.
    """
    remaining = iter(groups)
    try:
        first = next(remaining, None)
        if not first:
            raise ValueError("no weights to send: the first group is empty, or there is none")
        bucket = _bucket_of(first)
        torch.cuda.ipc_collect()  # what earlier calls have shared, and no process has mapped any more
        described = _described(first, bucket)
        receiver = _Receiver(address, timeout_s)
        try:
            receiver.await_connection()  # before: torch keeps a tensor for good that was to be shared and was not
            receiver.ask(reduce_tensor(bucket), "to map the bucket")
            receiver.load(described)
            for group in remaining:
                receiver.load(_described(group, bucket))
            receiver.ask(None, "to unmap the bucket")
            receiver.ask(None, "to finish the weights")
        except BaseException as error:
            receiver.end(error)
            raise
        finally:
            receiver.close()
    finally:
        if isinstance(remaining, Generator):
            remaining.close()  # its thread reads no more: the caller may use the reader, or close it


def _bucket_of(group: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """uint8: the whole storage of the group's tensors."""
    tensor = next(iter(group.values()))
    if tensor.device.type != "cuda":
        where = f"these tensors are on {tensor.device}"
        raise UnsupportedError(f"checkpoint-engine's receivers map memory of GPUs only, and {where}")
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _described(group: Mapping[str, torch.Tensor], bucket: torch.Tensor) -> list[dict[str, Any]]:
    """What a receiver is given of each tensor: checkpoint-engine's FlattenedTensorMetadata."""
    found = []
    for name, tensor in group.items():
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != bucket.data_ptr():
            raise ValueError(f"{name} is not contiguous, or not in the storage of the first tensor")
        at = tensor.storage_offset() * tensor.itemsize
        found.append({"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": at})
    return found


class _Receiver:
    """The other end of a conversation; used by one thread."""

    def __init__(self, address: str, timeout_s: float) -> None:
        try:
            import zmq
        except ImportError as error:
            why = "checkpoint-engine's receivers speak ZeroMQ"
            raise UnsupportedError(f"{why}: {install('checkpoint-engine')}") from error
        self._zmq, self._address, self._timeout_s = zmq, address, timeout_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.REQ_RELAXED, 1)  # what ends a receiver is sent while an answer is due, too
        self._socket.setsockopt(zmq.REQ_CORRELATE, 1)
        self._ends = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"cannot wait for a receiver at {address}: {error}") from error

    def await_connection(self) -> None:
        """Wait until a receiver has connected."""
        self._await(self._zmq.POLLOUT, "connected")

    def ask(self, message: object, what: str) -> None:
        """Send a message, and wait for the answer."""
        try:
            self._socket.send_pyobj(message, self._zmq.NOBLOCK)
        except self._zmq.Again as error:
            raise self._ended(f"been asked {what}") from error
        self._await(self._zmq.POLLIN, f"answered when asked {what}")
        if answer := self._socket.recv():
            raise ReceiverError(f"the receiver at {self._address} was asked {what}: {answer.decode()}")

    def load(self, described: list[dict[str, Any]]) -> None:
        """Let it load a group; until it has, the group's part of the bucket must not change."""
        self.ask(described, f"to load {', '.join(one['name'] for one in described[:3])}")

    def _await(self, event: int, what: str) -> None:
        poller = self._zmq.Poller()
        poller.register(self._socket, event)
        poller.register(self._ends, self._zmq.POLLIN)
        found = dict(poller.poll(round(1000 * self._timeout_s)))
        if self._socket in found:
            return
        if found:
            raise self._ended(what)
        raise WaitTimeoutError(f"no receiver at {self._address} has {what} within {self._timeout_s:g} s")

    def _ended(self, what: str) -> ReceiverError:
        why = "its own log may say why"
        return ReceiverError(f"the receiver at {self._address} has ended and not {what}; {why}")

    def end(self, error: BaseException) -> None:
        """Let the receiver raise `error` as a RuntimeError, whose class any process has. Waits for nothing."""
        with suppress(self._zmq.ZMQError):  # its process may have ended
            self._socket.send_pyobj(RuntimeError(f"{type(error).__name__}: {error}"), self._zmq.NOBLOCK)

    def close(self) -> None:
        """Waits for a second at most, for what was sent last to be on its way."""
        self._socket.disable_monitor()
        self._ends.close()  # or the context would wait for it for ever
        self._socket.close(linger=_NOTICE_MS)
        self._context.term()
