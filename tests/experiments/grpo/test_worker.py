"""What the rollout process answers, here without its process."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from support.handover_jobs import Job
from support.members import F32, Layout
from support.small_model import toy

from odc.errors import ConfigError, WaitTimeoutError
from odc.experiments.grpo import rollout
from odc.experiments.grpo.rollout import Rollout
from odc.experiments.grpo.worker import answer, refuse_left_out
from odc.handover import Reader

LAYOUT: Layout = [[("w", 2, F32)]]


class Echo:
    """Stands in for the model: its answer is the mean of its weights."""

    def __init__(self) -> None:
        self.own: dict[str, torch.Tensor] = {"u0.w": torch.zeros(3)}

    def update(self, reader: Reader, at_least: int) -> int:
        return reader.read(self.own, at_least=at_least).version

    def respond(self, prompts: Any, step: int) -> Any:
        return [step, self.own["u0.w"].mean().item()]


class Beside:
    """Stands in for the process: the test itself answers, over the socket that the process would have."""

    returncode = 0

    def __init__(self, command: list[str], **options: Any) -> None:
        self.channel = Connection(os.dup(int(command[-1])))

    def kill(self) -> None:
        self.channel.close()

    def wait(self) -> int:
        return self.returncode

    def poll(self) -> None:
        return None


def test_responses_come_from_weights_at_least_as_new_as_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The job has published version 2 when version 3 is asked for: there is no answer from the old weights."""
    monkeypatch.setattr(rollout.subprocess, "Popen", Beside)
    echo: Any = Echo()
    with Job(LAYOUT) as job, Rollout(toy(tmp_path), [1], job.handle) as asked:
        channel = asked._process.channel  # type: ignore[attr-defined]
        first = channel.recv()
        for version in (1, 2):
            job.publish([version, version])
        with Reader(first["handle"]) as reader:
            monkeypatch.setattr(reader, "_timeout_s", 0.1)  # not before it has attached, which a busy machine may delay
            for at_least in (1, 2, 3):
                asked.ask(at_least, [[5]], at_least=at_least)
                request = channel.recv()
                if at_least == 3:
                    with pytest.raises(WaitTimeoutError, match="to publish version 3"):
                        answer(echo, reader, request)
                    job.publish([3, 3])
                channel.send(answer(echo, reader, request))
                newest = max(2, at_least)
                assert asked.collect() == (newest, [at_least, float(newest)])


def test_what_vllm_would_not_get_is_refused() -> None:
    refuse_left_out(())
    with pytest.raises(ConfigError, match=r"rollout: vLLM would not get gate.bias \(2 buffers or unsharded weights\)"):
        refuse_left_out(("gate.bias", "other"))
