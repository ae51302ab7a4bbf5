"""`odc train` under launchers that are not torchrun: their variables, real processes, and a real Slurm."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from support.command import odc
from support.ports import free_ports
from support.slurm import Slurm, need_slurm
from support.tiny_job import tiny_job

from odc.cli import launched
from odc.cli.launched import Start, how_to_start, join_launcher, refuse_launcher, under_launcher
from odc.errors import ConfigError

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("transformers", reason="needs the train extra")

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def tasks(count: int) -> list[dict[str, str]]:
    """What srun sets for each task of a step on one node."""
    step = {"SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count)}
    step |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": str(count), "SLURM_STEP_NODELIST": "n1"}
    return [step | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(count)]


def pods(count: int, **more: str) -> list[dict[str, str]]:
    """What a TrainJob sets in each of its pods."""
    job = {"PET_NNODES": str(count), "PET_MASTER_ADDR": "127.0.0.1", **more}
    return [job | {"PET_NODE_RANK": str(pod), "JOB_COMPLETION_INDEX": str(pod)} for pod in range(count)]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    job = tiny_job(tmp_path_factory.mktemp("job"))
    options = ["--model", job.model, "--data", job.data, "--tokenizer", "bytes", "--max-tokens", "96"]
    return [*options, "--minibatch-size", "6", "--steps", "3", "--lr", "1e-2", "--cache", str(job.cache)]


def losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "steps.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the job whose ranks odc starts itself."""
    output = tmp_path_factory.mktemp("expected") / "out"
    assert odc("train", *options, "--ranks", 2, "--output", output) == 0
    return losses(output)


def together(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of `python -m odc.cli` with each of the environments at once."""
    base = {name: text for name, text in os.environ.items() if name not in LAUNCHERS}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "odc.cli", *map(str, command)],
            env={**base, **one},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for one in environments
    ]
    try:
        ended = [process.communicate(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(started, ended, strict=True)]


def test_tasks_of_srun_train_as_ranks_do_that_odc_starts(
    options: list[str], expected: list[float], tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    each = [one | {"MASTER_PORT": str(port)} for one in tasks(2)]
    first, second = together(["train", *options, "--output", str(tmp_path / "out")], each)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-5)
    assert "step 3: loss" in first[1] and not second[1], "rank 0 prints the summary"


@pytest.mark.thorough
def test_a_pod_a_host_starts_the_ranks_of_its_host(options: list[str], expected: list[float], tmp_path: Path) -> None:
    """Four ranks in two pods: the samples are those of two ranks, and so are the losses."""
    (port,) = free_ports(1)
    each = pods(2, PET_NPROC_PER_NODE="2", PET_MASTER_PORT=str(port))
    first, second = together(["train", *options, "--output", str(tmp_path / "out")], each)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-5)
    assert "step 3: loss" in first[1] and not second[1]


@pytest.mark.thorough
def test_grpo_under_srun(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    each = [one | {"MASTER_PORT": str(port)} for one in tasks(2)]
    first, second = together(["grpo", "--steps", "2", "--prompts", "4", "--response-tokens", "8"], each)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "step 2: reward" in first[1] and "step 2: reward" not in second[1]


@pytest.mark.thorough
def test_hosts_that_start_ranks_survive_no_deaths(options: list[str]) -> None:
    ended = together(["train", *options, "--ranks", "4", "--recover", "1"], pods(2))
    assert all(code == 2 and "recover: 2 ranks of a process" in errors for code, _, errors in ended), ended


def test_what_is_missing_ends_the_command(options: list[str]) -> None:
    ((code, _, errors),) = together(["train", *options], [pods(2)[1]])
    assert code == 2 and "ranks: Indexed Job starts one process a host" not in errors
    assert "ranks: TrainJob starts one process a host and does not say for how many ranks" in errors


def next_command(printed: str, folder: Path) -> list[str]:
    """The words with which a job says that it goes on in `folder`."""
    (found,) = [shlex.split(line)[2:] for line in printed.splitlines() if line.startswith("go on ")]
    assert found[-1] == str(folder / "out")
    return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    need_slurm()
    made = Slurm(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


def test_under_a_real_srun(slurm: Slurm, options: list[str], expected: list[float], tmp_path: Path) -> None:
    path = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    command = [sys.executable, "-m", "odc.cli", "train", *options, "--output", str(tmp_path / "out")]
    printed = slurm.start(["srun", "-n", "2", *command], path).communicate(timeout=400)[0]
    assert printed.count("step 3: loss") == 1, printed
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-5)
    more = next_command(printed, tmp_path)
    assert more[:6] == ["srun", "--nodes", "1", "--ntasks-per-node", "2", "odc"]
    slurm.start([*more[:5], sys.executable, "-m", "odc.cli", *more[6:]], path).communicate(timeout=400)
    assert len(losses(tmp_path / "out")) == 6
    look = "from odc.doctor.launcher import launcher; print(launcher())"
    shown = slurm.start(["srun", "-n", "2", sys.executable, "-c", look], path).communicate(timeout=400)[0]
    assert sorted(shown.splitlines()) == [
        f"srun: 2 processes on 1 host, rank {rank}; nothing missing" for rank in (0, 1)
    ]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that this process's commands see."""
    found: dict[str, str] = {}
    monkeypatch.setattr(launched.os, "environ", found)
    return found


@pytest.mark.parametrize(
    ("each", "given", "starts"),
    [
        ({}, {}, 0),
        (tasks(4)[2], {}, 1),
        (tasks(4)[2], {"ranks": 4}, 1),
        (tasks(1)[0], {"ranks": 4}, 0),
        (pods(2)[1], {"ranks": 2}, 1),
        (pods(2)[1], {"ranks": 6}, 3),
        (pods(2, PET_NPROC_PER_NODE="4")[1], {}, 4),
        (pods(2, PET_NPROC_PER_NODE="4")[1], {"ranks": 2}, 1),
        (pods(1, PET_NPROC_PER_NODE="4")[0], {}, 0),
        (pods(1, PET_NPROC_PER_NODE="4")[0], {"ranks": 2}, 0),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, {"ranks": 7}, 1),
    ],
)
def test_ranks_that_a_process_starts(
    each: dict[str, str], given: dict[str, int], starts: int, environment: dict[str, str]
) -> None:
    environment.clear()
    environment |= each
    named = given.get("ranks")
    assert join_launcher(given) == starts
    if "PET_NPROC_PER_NODE" in each and not starts:
        assert given == {"ranks": named or 4}, "of a single host"
    if starts and "RANK" not in each:
        ranks = launched.given_by_launcher(given)["ranks"]
        assert ranks == given.get("ranks", 4 * (1 + (starts == 4)))
        assert int(environment["RANK"]) == starts * int(each.get("SLURM_PROCID", each.get("PET_NODE_RANK", 0)))


@pytest.mark.parametrize(
    ("each", "given", "message"),
    [
        (tasks(4)[2], {"ranks": 8}, "srun starts several processes a host"),
        (tasks(4)[2], {"ranks": 6}, "--ranks must be 4 or a multiple, not 6"),
        (pods(2)[0], {"ranks": 1}, "--ranks must be 2 or a multiple, not 1"),
        (pods(2)[0], {}, "name those of all 2 hosts"),
        (tasks(4)[2] | {"SLURM_LOCALID": ""}, {}, "srun: SLURM_LOCALID is not set"),
        (pods(2)[0] | {"PET_NNODES": "1:2"}, {"ranks": 16}, "TrainJob: PET_NNODES is '1:2', which is no number"),
    ],
)
def test_numbers_that_do_not_fit(
    each: dict[str, str], given: dict[str, int], message: str, environment: dict[str, str]
) -> None:
    environment.clear()
    environment |= each
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        join_launcher(given)


def test_a_batch_script_is_warned_and_starts_its_own_ranks(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    environment.clear()
    environment |= {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}
    assert join_launcher({"ranks": 4}) == 0 and not capsys.readouterr().err
    assert join_launcher({}) == 0
    assert "odc: Slurm: SLURM_NTASKS=4 without srun" in capsys.readouterr().err
    refuse_launcher("odc compare-grpo")
    environment |= tasks(2)[0]
    assert under_launcher() == "srun"
    with pytest.raises(ConfigError, match="odc compare-grpo starts its own ranks, on one host; start it without srun"):
        refuse_launcher("odc compare-grpo")


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
AGENT = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
MPIRUN |= {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
ARGUMENTS = ["train", "--model", "m"]


def above(folder: Path, *lines: str) -> Path:
    """A procfs: process 2 has the first command line, its parent, 3, the second, and so on."""
    for pid, line in enumerate(lines, 2):
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in line.split()))
        (folder / str(pid) / "stat").write_text(f"{pid} (a ) name) S {pid + 1} 0 0")
    return folder


@pytest.mark.parametrize(
    ("each", "lines", "words", "note"),
    [
        ({}, ["torchrun odc train --model m"], "odc", ""),
        (tasks(4)[2], [], "srun --nodes 1 --ntasks-per-node 4 odc", ""),
        (tasks(4)[0] | {"SLURM_STEP_NUM_NODES": "2"}, [], "srun --nodes 2 --ntasks-per-node 2 odc", ""),
        (AGENT, ["/v/python /v/torchrun -m odc.cli train --model m", "bash"], "torchrun -m odc.cli", ""),
        (
            AGENT,
            ["/v/python -m torch.distributed.run x.py train --model m"],
            "/v/python -m torch.distributed.run x.py",
            "",
        ),
        (AGENT, ["nice odc train --model m", "time run odc train --model m"], "time run odc", ""),
        (AGENT, ["run odc train --model other"], "odc", "by the launcher of this job"),
        (
            AGENT | {"LOCAL_WORLD_SIZE": "1"},
            ["t -m odc.cli train --model m"],
            "t -m odc.cli",
            "on every host, as this job",
        ),
        (TORCHRUN, ["timeout 9 odc train --model m"], "odc", "by the launcher of this job"),
        (MPIRUN, ["proxy", "mpirun -n 2 odc train --model m"], "mpirun -n 2 odc", ""),
        (pods(2)[0], ["timeout 9 odc train --model m"], "odc", "by the launcher of this job"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, [], "odc", ""),
    ],
)
def test_how_a_job_was_started(
    each: dict[str, str],
    lines: list[str],
    words: str,
    note: str,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment.clear()
    environment |= each
    monkeypatch.setattr(launched.shutil, "which", lambda program: f"/v/{program}")
    assert how_to_start(ARGUMENTS, 2, above(tmp_path, *lines)) == Start(tuple(words.split()), note)


@pytest.mark.thorough
def test_under_torchrun_the_next_command_repeats_it(options: list[str], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "odc.cli"]
    base = {name: text for name, text in os.environ.items() if name not in LAUNCHERS}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    command = [*torchrun, "train", *options, "--output", str(tmp_path / "out")]
    for steps in (3, 6):
        printed = subprocess.run(command, env=base, capture_output=True, text=True, check=True, timeout=400).stdout
        assert len(losses(tmp_path / "out")) == steps
        command = next_command(printed, tmp_path)
        assert command[: len(torchrun) + 1] == [*torchrun, "train"]
