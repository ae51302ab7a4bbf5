"""Rank 0's hold on the rollout process, and the feed that gives every rank the samples of a step.

The process is a fresh interpreter with one socket; it can be killed without harm and ends by itself when rank 0 does.
Under the odc arms it reads the ranks' published shards; under fsdp2 arms a collective gathers the weights.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from odc import handover
from odc.errors import DataError, OdcError, PeerLostError, WaitTimeoutError
from odc.experiments.config import GrpoConfig
from odc.experiments.grpo.samples import Response, Sample, Task
from odc.fsdp import root_of

_POLL_S = 0.2


class RolloutError(OdcError):
    """The rollout process failed or ended; the message has its error."""


class Rollout:
    """The process, started at once. On rank 0; close it, or use it as a context manager.

    `handle` is for reading the weights from the ranks (`odc.handover.weight_handle`); None if they will be sent.
    """

    def __init__(self, config: GrpoConfig, stop_ids: Sequence[int], handle: str | None) -> None:
        self._timeout_s = config.timeout_s
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "odc.experiments.grpo.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._channel = Connection(ours.detach())
        self._send({"config": config, "stop_ids": list(stop_ids), "handle": handle})

    def ask(
        self,
        step: int,
        prompts: Sequence[Sequence[int]],
        *,
        at_least: int = 1,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Ask for a step's responses; return at once. One request at a time.

        The process reads the weights itself, version `at_least` or newer, or takes `weights` (fp32, by name).
        """
        sent = {name: tensor.numpy() for name, tensor in weights.items()} if weights is not None else {}
        self._send({"step": step, "prompts": prompts, "at_least": at_least, "weights": sent})

    def collect(self, check: Callable[[], object] = lambda: None) -> tuple[int | None, list[Response]]:
        """The version that was read (None: sent), and the responses, prompt after prompt.

        Raises RolloutError if the process failed or was killed, PeerLostError if it could not read a rank that is gone,
        WaitTimeoutError if it did not answer in `timeout_s`, and what `check` does, which is called now and then.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._channel.poll(_POLL_S):
            check()
            if self._process.poll() is not None and not self._channel.poll(0):
                raise RolloutError(f"the rollout process ended with code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"the rollout process has not answered for {self._timeout_s:g} s")
        try:
            answer: dict[str, Any] = self._channel.recv()
        except (EOFError, ConnectionResetError):
            raise RolloutError(f"the rollout process ended with code {self._process.wait()}") from None
        if answer.get("lost") is not None:
            raise PeerLostError(f"the rollout process failed: {answer['error']}", culprit=answer["lost"])
        if "error" in answer:
            raise RolloutError(f"the rollout process failed: {answer['error']}\n{answer['traceback']}")
        return answer["version"], answer["responses"]

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise RolloutError(f"the rollout process ended with code {self._process.wait()}") from None

    def close(self) -> None:
        """Ends the process, whatever it does. Idempotent."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class SampleFeed:
    """Weights out, samples in, in one generation of the job. On every rank; rank 0 has the rollout process.

    `model` is sharded. `held` and `newest` are what `hold` returned and the last version that was asked for, in the
    same job before: of a checkpoint, or of the generation before. All ranks make one together.
    """

    def __init__(
        self, config: GrpoConfig, task: Task, model: Any, held: dict[str, Any] | None, newest: int | None
    ) -> None:
        self._config, self._task, self._model = config, task, model
        self._held = (held["version"], [Sample(**fields) for fields in held["samples"]]) if held is not None else None
        self._asked: int | None = None  # the step whose samples are being drawn
        self.newest = newest
        # Versions count on: the first to be asked for is 2 in new heaps, and follows upon the last step's updates.
        self._before = 0 if newest is None else newest + config.minibatches - 2
        self._rollout: Rollout | None = None
        self._ending = contextlib.ExitStack()
        self._group: dist.ProcessGroup | None = None
        if not config.recover:  # whose process group waits long, and is connected already
            # A group of its own, whose ranks may wait as long as a rollout may take.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_s))
            self._ending.callback(dist.destroy_process_group, self._group)
        text = self._first_handle()
        if dist.get_rank() == 0:
            self._rollout = self._ending.enter_context(Rollout(config, task.stop_ids, text))

    def close(self) -> None:
        self._ending.close()

    def samples(self, step: int) -> tuple[int | None, list[Sample]]:
        """A step's samples, the same on every rank, and the version that drew them; sends the weights off before."""
        if self._held is None and self._asked != step:
            self._ask(step)
        version, samples = self._held or self._collected(step)
        self._held = None
        if self._config.lag and step + 1 < self._config.steps:
            self._ask(step + 1)
        return version, samples

    def hold(self, step: int) -> dict[str, Any] | None:
        """The samples of `step` that are being drawn from older weights, as JSON types; waits for them. Or None."""
        if not self._config.lag or step >= self._config.steps:
            return None
        if self._held is None:  # a checkpoint and a kept step may both hold them
            self._held = self._collected(step)
        version, samples = self._held
        return {"version": version, "samples": [asdict(sample) for sample in samples]}

    def _first_handle(self) -> str | None:
        if not self._config.on_demand:
            return None
        self._model.publish()
        return handover.weight_handle(self._model) if dist.get_rank() == 0 else None

    def _ask(self, step: int) -> None:
        """Publish the weights, or gather and send them, and ask for responses; waits for no rollout."""
        config, prompts = self._config, self._task.prompts(step)
        self._asked = step
        if config.on_demand:
            self._model.publish()
            version = handover.version(self._model)
            self.newest = self._before + version
            if self._rollout is not None:
                self._rollout.ask(step, prompts, at_least=version)
            return
        state: dict[str, Any] = self._model.state_dict()  # buffers are plain tensors
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}
        if self._rollout is not None:
            self._rollout.ask(step, prompts, weights=whole)

    def _collected(self, step: int) -> tuple[int | None, list[Sample]]:
        collected: list[Any] = [self._collect(step)] if self._rollout is not None else [None]
        dist.broadcast_object_list(collected, 0, group=self._group)
        version, samples = collected[0]
        return version, samples

    def _check(self) -> None:
        """PeerLostError if a rank is lost while the others wait for a rollout."""
        root_of(self._model).minibatch.absent(None, "waiting for a rollout")

    def _collect(self, step: int) -> tuple[int | None, list[Sample]]:
        assert self._rollout is not None
        version, responses = self._rollout.collect(self._check if self._config.on_demand else lambda: None)
        version = version and self._before + version
        prompts, group, samples = self._task.prompts(step), self._config.group, []
        for number, response in enumerate(responses):
            prompt = prompts[number // group]
            reward = float(self._task.reward(prompt, response.tokens))
            if not math.isfinite(reward):
                raise DataError(f"step {step + 1}: the reward of response {number} is {reward}")
            samples.append(
                Sample(number // group, list(prompt), response.tokens, response.log_probs, response.reference, reward)
            )
        return version, samples
