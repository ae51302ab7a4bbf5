"""Rank 0's hold on the rollout process: ask for a step's responses, collect them.

Chose a fresh interpreter with one socket over a fork of the rank or a queue: it shares nothing with the training group,
can be killed without harm to it, and ends by itself when rank 0 does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from torch import Tensor

from odc.errors import OdcError, WaitTimeoutError
from odc.experiments.grpo.config import GrpoConfig
from odc.experiments.grpo.generate import Response

_LOOK_S = 0.2


class RolloutError(OdcError):
    """The rollout process failed or ended; the message has its error."""


class Rollout:
    """The process, started at once. On rank 0; close it, or use it as a context manager.

    Args:
        config: of the job.
        stop_ids: tokens that end a response.
        ticket: for reading the weights from the ranks (`odc.handover.weight_handle`); None if they will be sent.
    """

    def __init__(self, config: GrpoConfig, stop_ids: Sequence[int], ticket: str | None) -> None:
        self._timeout_s = config.timeout_s
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "odc.experiments.grpo.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._channel = Connection(ours.detach())
        self._send({"config": config, "stop_ids": list(stop_ids), "ticket": ticket})

    def ask(
        self,
        step: int,
        prompts: Sequence[Sequence[int]],
        *,
        at_least: int = 1,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Have a step's responses drawn; returns at once. One request at a time.

        The process reads the weights itself, version `at_least` or newer, or takes `weights` (fp32, by name).
        """
        sent = {name: tensor.numpy() for name, tensor in weights.items()} if weights is not None else {}
        self._send({"step": step, "prompts": prompts, "at_least": at_least, "weights": sent})

    def collect(self) -> tuple[int | None, list[Response]]:
        """The version that was read (None: sent), and the responses, prompt after prompt.

        Raises:
            RolloutError: the process failed or was killed.
            WaitTimeoutError: it did not answer in `timeout_s`.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._channel.poll(_LOOK_S):
            if self._process.poll() is not None and not self._channel.poll(0):
                raise RolloutError(f"the rollout process ended with code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"the rollout process has not answered for {self._timeout_s:g} s")
        try:
            answer: dict[str, Any] = self._channel.recv()
        except (EOFError, ConnectionResetError):
            raise RolloutError(f"the rollout process ended with code {self._process.wait()}") from None
        if "error" in answer:
            raise RolloutError(f"the rollout process failed: {answer['error']}\n{answer['traceback']}")
        return answer["version"], answer["responses"]

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise RolloutError(f"the rollout process ended with code {self._process.wait()}") from None

    def close(self) -> None:
        """End the process, whatever it does. Idempotent."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Rollout:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
