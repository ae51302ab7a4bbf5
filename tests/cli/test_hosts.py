"""`odc train` on two hosts, started by torchrun on each as docs/hosts.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.hosts import Hosts, need_hosts
from support.tiny_job import tiny_job


@pytest.mark.thorough
def test_train_over_two_hosts_reaches_the_loss_of_fsdp2(tmp_path: Path) -> None:
    need_hosts()
    job = tiny_job(tmp_path)
    options = ["--model", job.model, "--data", job.data, "--tokenizer", "bytes", "--max-tokens", "96"]
    options += ["--minibatch-size", "6", "--steps", "3", "--lr", "1e-2", "--cache", job.cache]
    losses = {}
    with Hosts(2) as hosts:
        for arm in (("--arm", "odc"), ("--plan", "dynamic"), ("--arm", "fsdp2")):
            started = hosts.torchrun(2, "-m", "odc.cli", "train", *options, *arm)
            said = [process.communicate(timeout=400)[0] for process in started]
            assert [process.returncode for process in started] == [0, 0], said
            found = re.search(r"^step 3: loss ([\d.]+)", said[0], re.MULTILINE)
            assert found, said[0]
            assert not re.search(r"^step 3: loss", said[1], re.MULTILINE), "one rank of the job prints its summary"
            losses[arm[1]] = float(found[1])
    assert losses["odc"] == pytest.approx(losses["fsdp2"], rel=1e-3)
    assert losses["dynamic"] == pytest.approx(losses["fsdp2"], rel=1e-3)
