"""The recipes of docs/clusters.md run as they stand there, by the variables that each launcher sets.

Ray's are in tests/integrations/test_ray.py. Manifests have the structure that their schemas ask for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.clusters import PAGE, ClusterFolder, blocks, manifests, recipe
from support.ports import free_ports
from support.slurm import Slurm, need_slurm

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("transformers", reason="needs the train extra")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two ranks of the page's script return under torchrun."""
    return ClusterFolder(tmp_path_factory.mktemp("torchrun")).under_torchrun(2)


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    return ClusterFolder(tmp_path)


def trained(folder: ClusterFolder) -> None:
    """`odc train` has run once, and all of its steps."""
    lines = (folder.folder / "output" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def port() -> str:
    return str(free_ports(1)[0])


def test_recipes_are_short() -> None:
    for heading in re.findall(r"^## (.*)$", PAGE, re.MULTILINE):
        for language in ("bash", "python", "yaml"):
            for block in blocks(heading, language):
                assert len(block.splitlines()) <= 30 - 5 * (heading != "A script of your own"), heading


def test_a_script_of_ones_own_under_srun(folder: ClusterFolder, expected: list[str]) -> None:
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"SLURM_STEP_NUM_NODES": "1", "MASTER_PORT": port()}
    folder.run(["python", "train.py"], [step | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"])
    assert folder.left() == expected


def test_the_script_under_spawn(folder: ClusterFolder, expected: list[str]) -> None:
    text = recipe("mp.spawn", "python")
    assert text.count("29500") == 1 and text.count("nprocs=2") == 1
    (folder.folder / "spawn.py").write_text(text.replace("29500", port()))
    folder.run(["python", "spawn.py"])
    assert folder.left() == expected


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    need_slurm()
    made = Slurm(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


def test_the_batch_script_in_a_real_slurm(slurm: Slurm, folder: ClusterFolder, expected: list[str]) -> None:
    text = recipe("Slurm", "bash")
    assert text.startswith("#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=8\nsrun odc train")
    (folder.folder / "job.sh").write_text(
        text.replace("--nodes=2 --ntasks-per-node=8", "--nodes=1 --ntasks-per-node=2")
    )
    folder.run(["sbatch", "--wait", "-o", str(folder.folder / "log"), "job.sh"], [slurm.environment])
    trained(folder)
    assert folder.left() == expected


def in_pods(folder: ClusterFolder, command: Sequence[str], env: Mapping[str, str], hosts: int, ranks: int = 1) -> None:
    """Run a container's command with the environment of its manifest, in as many pods, of so many ranks."""
    here = {**env, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port(), "PET_NPROC_PER_NODE": str(ranks)}
    folder.run(["bash", "-c", '"$@"', "-", *command], [here | {"JOB_COMPLETION_INDEX": str(i)} for i in range(hosts)])
    trained(folder)


@pytest.mark.thorough
def test_a_train_job(folder: ClusterFolder) -> None:
    """Fields are those of the CRD trainer.kubeflow.org/v1alpha1; the runtime torch-distributed sets PET_ variables."""
    (job,) = manifests("Kubeflow TrainJob")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job.keys() == {"apiVersion", "kind", "metadata", "spec"} and job["metadata"].keys() == {"name"}
    assert job["spec"].keys() == {"runtimeRef", "trainer"} and job["spec"]["runtimeRef"] == {
        "name": "torch-distributed"
    }
    trainer = job["spec"]["trainer"]
    of_the_crd = {"args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode"}
    assert trainer.keys() <= of_the_crd and all(isinstance(word, str) for word in trainer["command"])
    assert all(isinstance(trainer[name], int) for name in ("numNodes", "numProcPerNode"))
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    here = {"PET_NNODES": str(trainer["numNodes"]), "PET_MASTER_ADDR": "127.0.0.1", "PET_NPROC_PER_NODE": "1"}
    here |= {"PET_MASTER_PORT": port()}
    folder.run(trainer["command"], [here | {"PET_NODE_RANK": str(i), "JOB_COMPLETION_INDEX": str(i)} for i in range(2)])
    trained(folder)


def test_an_indexed_job(folder: ClusterFolder) -> None:
    service, job = manifests("Indexed Job")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert service["spec"].keys() == {"clusterIP", "publishNotReadyAddresses", "selector"}
    assert service["spec"]["clusterIP"] == "None", "a headless one, which is a text"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job") and job["spec"]["completionMode"] == "Indexed"
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] and pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert all(isinstance(value, str) for value in env.values())
    hosts = job["spec"]["completions"]
    assert hosts == job["spec"]["parallelism"] == int(env["PET_NNODES"])
    assert env["PET_MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}", "the first pod of the job"
    in_pods(folder, container["command"], env, hosts)


def shell_of(task: Mapping[str, Any]) -> list[str]:
    """Commands of a task of SkyPilot or dstack, in order."""
    return [task["setup"], task["run"]] if "run" in task else list(task["commands"])


@pytest.mark.thorough
@pytest.mark.parametrize("heading", ["SkyPilot", "dstack"])
def test_tasks_of_clouds(heading: str, folder: ClusterFolder) -> None:
    (task,) = manifests(heading)
    hosts = task["num_nodes"] if heading == "SkyPilot" else task["nodes"]
    of_sky, of_dstack = {"name", "num_nodes", "resources", "workdir", "setup", "run"}, {"type", "name", "nodes"}
    assert task.keys() == (of_sky if heading == "SkyPilot" else {*of_dstack, "resources", "commands"})
    assert set(task["resources"].items()) in ({("accelerators", "H100:8")}, {("gpu", "H100:8")})
    variables = {
        "SkyPilot": {
            "SKYPILOT_NUM_NODES": str(hosts),
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        },
        "dstack": {"DSTACK_NODES_NUM": str(hosts), "DSTACK_MASTER_NODE_IP": "127.0.0.1", "DSTACK_GPUS_PER_NODE": "1"},
    }[heading] | {"MASTER_PORT": port()}
    number = "SKYPILOT_NODE_RANK" if heading == "SkyPilot" else "DSTACK_NODE_RANK"
    folder.run(["bash", "-ec", "\n".join(shell_of(task))], [variables | {number: str(host)} for host in range(hosts)])
    trained(folder)
