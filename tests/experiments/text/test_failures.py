"""A rank that fails in the middle of a job under odc: who is named, and that nobody lives on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.tiny_job import tiny_job

from odc.experiments import job
from odc.experiments.config import JobConfig
from odc.experiments.launch import JobFailedError, launch
from odc.experiments.text.step import TextTrainer
from odc.experiments.text.workload import TextWorkload

pytest.importorskip("transformers", reason="needs the train extra")


def _breaking(config: JobConfig, what: Callable[[], None]) -> None:
    """The job, but rank 1 does `what` in its first forward of step 2."""
    plain = TextTrainer._minibatch

    def minibatch(self: TextTrainer, *args: Any) -> float:
        losses = self.model.forward
        steps.append(1)

        def forward(*inputs: Any, **named: Any) -> Any:
            if dist.get_rank() == 1 and len(steps) == 2:
                what()
            return losses(*inputs, **named)

        self.model.forward = forward
        try:
            return plain(self, *args)
        finally:
            self.model.forward = losses

    steps: list[int] = []
    TextTrainer._minibatch = minibatch  # type: ignore[method-assign]
    job.run_rank(TextWorkload(config))


def _raises(config: JobConfig) -> None:
    _breaking(config, _raise)


def _raise() -> None:
    raise ArithmeticError("this sample cannot be")


def _dies(config: JobConfig) -> None:
    _breaking(config, lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (_raises, r"rank 1 failed: ArithmeticError: this sample cannot be$"),
        # Whoever is faster tells: the agent that saw rank 1 end, or rank 0, whose server saw it.
        (
            _dies,
            r"rank (1 failed: the process was killed by SIGKILL|0 failed: .*rank 1 died in epoch)",
        ),
    ],
)
def test_the_job_names_the_rank_that_began_it(tmp_path: Path, entry: Callable[..., None], message: str) -> None:
    config = tiny_job(tmp_path, arm="odc", steps=50)
    began = time.monotonic()
    with pytest.raises(JobFailedError) as caught:
        launch(entry, config, ranks=2)
    assert re.match(message, str(caught.value).splitlines()[0]), str(caught.value)
    assert time.monotonic() - began < config.timeout_s, "it waited for the deadline"
