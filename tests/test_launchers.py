"""Ranks from launchers' variables: pure functions of a mapping, each launcher by what it sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc import launchers
from odc.errors import ConfigError
from odc.launchers import Launched, expand_counts, expand_hosts, export, find

#: Rank 5 of 3 + 3 tasks, as Slurm 22.05 writes it; the job has one more host than the step.
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "3(x3)",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_JOB_NODELIST": "gpu[007,010-011]",
    "SLURM_STEP_NODELIST": "gpu[010-011]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "n1",
    "PMIX_NAMESPACE": "prterun-n1-77@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",
}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
DSTACK = {
    "DSTACK_NODES_NUM": "2",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_MASTER_NODE_IP": "10.1.0.2",
    "DSTACK_GPUS_PER_NODE": "8",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}
ALL = {
    "torchrun": TORCHRUN,
    "mpirun": MPIRUN,
    "mpiexec": HYDRA,
    "srun": SRUN,
    "TrainJob": TRAINJOB,
    "SkyPilot": SKYPILOT,
    "dstack": DSTACK,
}


def missing(environment: dict[str, str]) -> str:
    found = find(environment)
    assert found is not None
    return "; ".join(found.missing)


def test_each_launcher_is_found_by_what_it_sets() -> None:
    port = find(SRUN).port  # type: ignore[union-attr]
    of_mpi = find(MPIRUN).port  # type: ignore[union-attr]
    assert {name: find(environment) for name, environment in ALL.items()} == {
        "torchrun": Launched("torchrun", 3, 4, 1, 2, 1, 2, "h", 1),
        "mpirun": Launched("mpirun", 3, 4, 1, 2, 1, 2, "n1", of_mpi),
        "mpiexec": Launched("mpiexec", 1, 2, 1, 2, 0, 1, "127.0.0.1", 29500),
        "srun": Launched("srun", 5, 6, 2, 3, 1, 2, "gpu010", port),
        "TrainJob": Launched("TrainJob", 1, 2, 0, 1, 1, 2, "job-node-0-0.job", 29400, ranks_each=4),
        "SkyPilot": Launched("SkyPilot", 1, 2, 0, 1, 1, 2, "10.0.0.4", 29500, ranks_each=8),
        "dstack": Launched("dstack", 1, 2, 0, 1, 1, 2, "10.1.0.2", 29500, ranks_each=8),
    }
    assert find({}) is None and find({"PATH": "/bin", "SLURM_CONF": "/etc"}) is None


def test_the_port_follows_from_the_job_and_the_step() -> None:
    """The same on every host; jobs and steps that share one mostly differ."""
    ports = {find(SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0"}).port for job in range(100)}  # type: ignore[union-attr]
    assert all(20000 <= port < 30000 for port in ports if port) and len(ports) > 90
    first, second = SRUN, SRUN | {"SLURM_STEP_ID": "3"}
    assert find(first).port != find(second).port  # type: ignore[union-attr]
    assert find(first | {"SLURM_PROCID": "3", "SLURM_LOCALID": "0"}).port == find(first).port  # type: ignore[union-attr]


def test_what_the_user_has_set_wins() -> None:
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"}
    for name, environment in ALL.items():
        found = find(environment | given)
        assert found is not None and (found.address, found.port) == ("10.0.0.1", 4711), name


def test_torchruns_variables_win_over_all_others() -> None:
    everything = {name: text for environment in ALL.values() for name, text in environment.items()}
    assert find(everything | TORCHRUN) == find(TORCHRUN)
    del everything["RANK"]
    assert find(everything).launcher == "mpirun", "which starts its daemons by srun"  # type: ignore[union-attr]


def test_a_loop_of_the_shell_sets_a_part_of_torchruns() -> None:
    few = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert find(few) == Launched("torchrun", 3, 4, 3, 4, 0, 1, "h", 1)
    assert missing({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}).startswith("MASTER_ADDR is not set")


def test_a_batch_script_is_no_task() -> None:
    """Slurm gives it SLURM_PROCID 0 and the job's tasks, but no step."""
    script = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    del script["SLURM_STEP_ID"]
    found = find(script)
    assert found is not None and found.world == 1 and found.launcher == "Slurm"
    assert found.describe() == (
        "Slurm: SLURM_NTASKS=6 without srun: this is the batch script's own process; put srun before it"
    )
    assert find(script | {"SLURM_NTASKS": "1"}) is None, "one process needs no srun"


def test_what_is_missing_under_srun() -> None:
    assert missing(SRUN | {"SLURM_LOCALID": ""}) == "SLURM_LOCALID is not set"
    assert "SLURM_PROCID is 'x', which is no number" in missing(SRUN | {"SLURM_PROCID": "x"})
    assert "--distribution=block" in missing(SRUN | {"SLURM_LOCALID": "0"}), "ranks 0, 2, 4 on the first host"
    assert missing(SRUN | {"SLURM_STEP_NODELIST": "gpu[010-"}).startswith("MASTER_ADDR is not set: SLURM_STEP_NODELIST")
    uneven = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "none", "SLURM_TASKS_PER_NODE": "", "SLURM_STEP_NUM_TASKS": "7"}
    assert missing(uneven) == "SLURM_STEP_TASKS_PER_NODE is 'none', for 7 tasks on 2 hosts"
    assert "contradict each other: rank 6 of 6" in missing(
        SRUN | {"SLURM_PROCID": "6", "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}
    )


def test_hosts_of_a_step_may_have_different_numbers_of_tasks() -> None:
    step = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_LOCALID": "1"}
    found = find(step)
    assert found is not None and not found.missing and (found.host, found.local_world) == (1, 2)


def test_one_host_meets_at_loopback() -> None:
    one = SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_NODEID": "0"}
    found = find(one | {"SLURM_LOCALID": "5", "SLURM_STEP_NODELIST": "a name that does not resolve"})
    assert found is not None and found.address == "127.0.0.1" and not found.missing


def test_what_is_missing_under_other_launchers() -> None:
    no_address = {name: text for name, text in MPIRUN.items() if name != "MASTER_ADDR"}
    assert missing(no_address) == "MASTER_ADDR is not set: export it, and pass it on (mpirun -x MASTER_ADDR)"
    assert "map by slot" in missing(MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    of_eight = MPIRUN | {
        "OMPI_COMM_WORLD_SIZE": "12",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    }
    differ = "hosts differ in their number of ranks, which mpirun does not say: use srun or torchrun"
    assert missing(of_eight) == differ, "8 ranks on the first host, 4 on the second"
    assert "PET_MASTER_ADDR" in missing({"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "0"})
    assert "PET_NNODES is '1:4', which is no number" in missing(TRAINJOB | {"PET_NNODES": "1:4"})
    assert "SKYPILOT_NODE_IPS is empty" in missing(SKYPILOT | {"SKYPILOT_NODE_IPS": " \n"})
    assert "DSTACK_MASTER_NODE_IP is empty" in missing({name: DSTACK[name] for name in list(DSTACK)[:2]})


def test_pmi_alone_does_not_name_the_ranks_of_a_host() -> None:
    """As under Flux: each process would be a job of its own."""
    some = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    found = find(some)
    assert found is not None and found.world == 4
    assert found.describe().startswith("PMI: PMI_RANK is set, but not MPI_LOCALNRANKS, the ranks of this host: export ")
    assert find(some | {"PMI_SIZE": "1"}) is None and find(some | SRUN) == find(SRUN), "srun --mpi=pmi2"
    on_a_cray = some | {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert find(on_a_cray) == Launched("mpiexec", 1, 4, 1, 2, 0, 2, "h", 1), "PALS"
    assert find(on_a_cray | SRUN) == find({"MASTER_ADDR": "h", "MASTER_PORT": "1"} | SRUN)


def test_an_indexed_job_is_alone_until_its_manifest_says_how_many_pods_it_has() -> None:
    """Such a Job may as well be a sweep."""
    alone = find({"JOB_COMPLETION_INDEX": "3"})
    assert alone is not None and alone.world == 1 and "PET_NNODES is not set" in alone.describe()
    pod = {"JOB_COMPLETION_INDEX": "3", "PET_NNODES": "4", "PET_MASTER_ADDR": "train-0.train"}
    assert find(pod) == Launched("Indexed Job", 3, 4, 0, 1, 3, 4, "train-0.train", 29500, ranks_each=0)
    assert find(pod | {"PET_NPROC_PER_NODE": "auto"}).ranks_each == 0  # type: ignore[union-attr]


def test_torchruns_variables_of_one_rank_and_of_the_first_of_several() -> None:
    srun, job = find(SRUN), find(TRAINJOB)
    assert srun is not None and job is not None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [srun.variables()[name] for name in names] == ["5", "6", "2", "3", "1", "2"]
    assert [job.variables(4)[name] for name in names] == ["4", "8", "0", "4", "1", "2"]
    assert find(srun.variables()) == Launched("torchrun", 5, 6, 2, 3, 1, 2, "gpu010", srun.port)
    with pytest.raises(ConfigError, match="srun starts several processes a host: let each of them be one rank"):
        srun.variables(2)


def test_describing_says_what_runs_where() -> None:
    assert find(SRUN).describe() == "srun: 6 processes on 2 hosts, rank 5; nothing missing"  # type: ignore[union-attr]
    assert Launched("srun").describe() == "srun: 1 process on 1 host; nothing missing"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of this process, empty, until the test ends."""
    found: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", found)
    return found


def test_exporting_sets_what_torch_reads(environment: dict[str, str]) -> None:
    environment.clear()
    assert export() is None and not environment
    environment |= SRUN
    found = export()
    assert found is not None and environment == SRUN | found.variables()
    assert export() == find(found.variables()), "a second time it finds torchrun's"


def test_exporting_says_why_it_cannot(environment: dict[str, str]) -> None:
    environment.clear()
    environment |= {**SRUN, "SLURM_STEP_ID": ""}
    with pytest.raises(ConfigError, match="put srun before it"):
        export()
    environment.clear()
    environment |= TRAINJOB
    with pytest.raises(ConfigError, match="TrainJob starts one process a host, for 4 ranks: start them by torchrun"):
        export()
    assert environment == TRAINJOB


def test_importing_reads_no_environment_and_no_torch() -> None:
    program = """
import os, sys
from collections import UserDict
class Unread(UserDict):
    def __getitem__(self, name): raise AssertionError(name)
    __contains__ = get = __iter__ = __getitem__
import odc
os.environ = Unread()
import odc.launchers
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert launchers.TORCHRUN == "torchrun"


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("localhost", ["localhost"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("a,b,c", ["a", "b", "c"]),
        ("gpu-[001,010-011],login1", ["gpu-001", "gpu-010", "gpu-011", "login1"]),
        ("r[1-2]n[8-9]", ["r1n8", "r1n9", "r2n8", "r2n9"]),
        ("n[9-11]-ib.cluster", ["n9-ib.cluster", "n10-ib.cluster", "n11-ib.cluster"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_node_lists(nodes: str, names: list[str]) -> None:
    assert expand_hosts(nodes) == names


@pytest.mark.parametrize("nodes", ["", ",", "n[1", "n[a]", "n[5-1]", "n[1-]x]", "n[]", "two names"])
def test_what_is_no_node_list(nodes: str) -> None:
    with pytest.raises(ValueError):
        expand_hosts(nodes)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=4), st.integers(1, 3))
def test_ranges_of_any_width(ranges: list[tuple[int, int]], width: int) -> None:
    text = ",".join(f"{first:0{width}d}-{first + more:0{width}d}" for first, more in ranges)
    numbers = [first + at for first, more in ranges for at in range(more + 1)]
    assert expand_hosts(f"n[{text}]") == [f"n{number:0{width}d}" for number in numbers] or any(
        len(str(first)) != len(str(first + more)) for first, more in ranges
    )


def test_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1] and expand_counts("8") == [8]
    for wrong in ("", "2(x3", "a", "2,,1"):
        with pytest.raises(ValueError, match="is no list of counts"):
            expand_counts(wrong)


def test_a_range_that_falls_names_no_host() -> None:
    assert "SLURM_STEP_NODELIST is 'n[5-1]'" in missing(SRUN | {"SLURM_STEP_NODELIST": "n[5-1]"})


@pytest.mark.parametrize("environment", [MPIRUN, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h"}])
def test_a_port_above_the_last_is_missing(environment: dict[str, str]) -> None:
    assert missing(environment | {"MASTER_PORT": "65536"}) == "port 65536 is above 65535"
    assert not missing(environment | {"MASTER_PORT": "65535"})


@given(st.dictionaries(st.sampled_from(sorted({n for e in ALL.values() for n in e})), st.text(max_size=3)))
def test_no_environment_raises(environment: dict[str, str]) -> None:
    found = find(environment)
    assert found is None or found.describe()
