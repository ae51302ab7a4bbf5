"""`odc train` and `odc compare` on two hosts, started by torchrun on each as in docs/hosts.md."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from support.command import odc
from support.hosts import Hosts, need_hosts
from support.tiny_job import tiny_job

from odc.cli.launched import given_by_launcher
from odc.trace import load_spans, rank_file


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the second of two ranks on the first of three hosts."""
    environment = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_one_process_on_each_host_compares(torchrun: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The others have nothing to do; this one would otherwise look for a store."""
    assert odc("compare", "--demo") == 0
    assert capsys.readouterr() == ("", "")
    assert odc("compare") == 2
    assert "odc: model: say which (--model), or run the demo (--demo)" in capsys.readouterr().err


def test_torchrun_says_how_many_ranks_there_are_and_hosts_are_nodes(
    torchrun: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert given_by_launcher({}) == {"ranks": 6, "per_node": 2}
    assert given_by_launcher({"per_node": 3}) == {"ranks": 6}
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")  # of 2 and 4
    assert given_by_launcher({}) == {"ranks": 6}


def test_other_comparisons_run_on_one_host(torchrun: None, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (("compare-grpo",), ("train-mm", "--data", "nowhere")):
        assert odc(*command) == 2
        assert "starts its own ranks, on one host; start it without torchrun" in capsys.readouterr().err


@pytest.mark.thorough
def test_train_over_two_hosts_reaches_the_loss_of_fsdp2(tmp_path: Path) -> None:
    need_hosts()
    job = tiny_job(tmp_path)
    options = ["--model", job.model, "--data", job.data, "--tokenizer", "bytes", "--max-tokens", "96"]
    options += ["--minibatch-size", "6", "--steps", "3", "--lr", "1e-2", "--cache", job.cache]
    losses = {}
    with Hosts(2) as hosts:
        for arm in (("--plan", "dynamic"), ("--arm", "fsdp2")):
            started = hosts.torchrun(1, "-m", "odc.cli", "train", *options, *arm)
            printed = [process.communicate(timeout=400)[0] for process in started]
            assert [process.returncode for process in started] == [0, 0], printed
            found = re.search(r"^step 3: loss ([\d.]+)", printed[0], re.MULTILINE)
            assert found, printed[0]
            assert not re.search(r"^step 3: loss", printed[1], re.MULTILINE), "one rank of the job prints its summary"
            losses[arm[1]] = float(found[1])
    assert losses["dynamic"] == pytest.approx(losses["fsdp2"], rel=1e-3)


@pytest.mark.thorough
def test_srun_over_two_hosts_needs_no_torchrun(tmp_path: Path) -> None:
    """Four processes with what srun sets for each: they find each other by the first name of the node list, which is
    that of a loopback address on its own host, as under Debian.
    """
    need_hosts()
    job = tiny_job(tmp_path)
    command = ["-m", "odc.cli", "train", "--model", job.model, "--data", job.data, "--tokenizer", "bytes"]
    command += ["--max-tokens", "96", "--minibatch-size", "6", "--steps", "3", "--lr", "1e-2", "--cache", job.cache]
    with Hosts(2) as hosts:
        for host in hosts:
            others = "".join(f"{one.address} {one.name}\n" for one in hosts if one is not host)
            names = tmp_path / f"names{host.number}"
            names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{others}")
            assert host.start(["mount", "--bind", str(names), "/etc/hosts"], "-m").wait() == 0
            host.call(f"route add default dev {host.device}")
        nodes = "host[0-1]"
        step = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
        step |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": nodes, "OMP_NUM_THREADS": "1"}
        started = []
        for rank in range(4):
            task = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % 2, "SLURM_NODEID": rank // 2}
            env = step | {name: str(number) for name, number in task.items()}
            started.append(hosts[rank // 2].command(sys.executable, *command, env=env))
        printed = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0, 0], printed
    assert re.search(r"^step 3: loss [\d.]+", printed[0], re.MULTILINE), printed
    assert not any("step 3: loss" in text for text in printed[1:]), printed


@pytest.mark.thorough
def test_compare_over_two_hosts_is_written_by_the_first(tmp_path: Path) -> None:
    """Figures, picture and the spans of all ranks; the other host writes nothing in the folder it was given."""
    need_hosts()
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    job = tiny_job(tmp_path)
    options = ["--model", job.model, "--data", job.data, "--tokenizer", "bytes", "--max-tokens", "96"]
    options += ["--minibatch-size", "6", "--steps", "2", "--cache", job.cache, "--arms", "fsdp2,odc-hybrid"]
    folders = [tmp_path / f"out{number}" for number in range(2)]
    with Hosts(2) as hosts:
        started = hosts.torchrun(2, "-m", "odc.cli", "compare", *options, each=[["--output", str(f)] for f in folders])
        printed = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    assert not folders[1].exists()
    figures = json.loads((folders[0] / "compare.json").read_text())
    assert figures["hosts"] == [0, 0, 1, 1] and figures["job"]["per_node"] == 2
    first, second = (figures["arms"][arm] for arm in ("fsdp2", "odc-hybrid"))
    assert second["loss"]["steps"] == pytest.approx(first["loss"]["steps"], rel=1e-3)
    for arm, run in ((arm, run) for arm, own in figures["arms"].items() for run in own["runs"]):
        assert len(run["peak_bytes"]) == 4 and min(run["baseline_bytes"]) > 0, arm
        assert 0 < run["bubble"][0] < 1 and run["step_s"][0] < 300, "the clocks of the hosts have been brought together"
        for rank in range(4):
            assert load_spans(rank_file(folders[0] / "spans" / f"{arm}-0", rank)), (arm, rank)
    assert "4 ranks on 2 hosts" in printed[0] and "odc-hybrid" in printed[0] and "figures" not in printed[1]
    assert (folders[0] / "timeline.png").stat().st_size > 10_000
