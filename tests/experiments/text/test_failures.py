"""A rank that fails in the middle of a job under odc: it is named, and no rank lives on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.tiny_job import tiny_job

from odc.experiments import job
from odc.experiments.config import JobConfig
from odc.experiments.launch import JobFailedError, launch
from odc.experiments.text import step as steps

pytest.importorskip("transformers", reason="needs the train extra")


def raises(*unused: Any) -> None:
    raise ArithmeticError("this sample cannot be")


def dies(*unused: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def breaking(config: JobConfig, fail: Callable[..., None]) -> None:
    """The job, but rank 1 calls `fail` before its first forward of step 2."""

    class Breaking(steps.TextTrainer):
        def run(self, step: int, *args: Any) -> Any:
            if step == 1 and dist.get_rank() == 1:
                self.model.register_forward_pre_hook(fail)
            return super().run(step, *args)

    with mock.patch.object(steps, "TextTrainer", Breaking):
        job.run_rank(steps.TextWorkload(config))


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (raises, r"rank 1 failed: ArithmeticError: this sample cannot be$"),
        # Of two observers the faster one is heard: the launcher, or rank 0, whose server saw the death.
        (dies, r"rank (1 failed: the process was killed by SIGKILL|0 failed: .*rank 1 died in epoch)"),
    ],
)
def test_the_job_names_the_rank_that_began_it(tmp_path: Path, fail: Callable[..., None], message: str) -> None:
    config = tiny_job(tmp_path, arm="odc", steps=50, timeout_s=600.0)
    began = time.monotonic()
    with pytest.raises(JobFailedError) as caught:
        launch(breaking, config, fail, ranks=2)
    assert re.match(message, str(caught.value).splitlines()[0]), str(caught.value)
    assert time.monotonic() - began < config.timeout_s, "it waited for the deadline"
