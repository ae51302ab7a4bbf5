"""The recipes of docs/clusters.md, as they stand there, and a folder in which they run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from support.tiny_job import tiny_job

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
#: Each rank of a recipe's `train.py` leaves what it returns in a file beside it.
_LEFT = """

of_the_page = train


def train():
    import pathlib

    found = of_the_page()
    pathlib.Path(__file__).with_name(f"rank-{dist.get_rank()}").write_text(f"{found:.4f}")
    return found
"""
#: Options of a small job, after those of a recipe: of an option that is given twice the last counts.
_SMALL = "--tokenizer bytes --max-tokens 96 --minibatch-size 6 --steps 3 --lr 1e-2 --device cpu"


def blocks(heading: str, language: str) -> list[str]:
    """The blocks of code of one language under a heading."""
    text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def recipe(heading: str, language: str) -> str:
    """The only block of one language under a heading."""
    (found,) = blocks(heading, language)
    return found


def manifests(heading: str) -> list[dict[str, Any]]:
    """The documents of a recipe in YAML."""
    return list(yaml.safe_load_all(recipe(heading, "yaml")))


class ClusterFolder:
    """A folder with the page's `train.py`, a small model and data, and programs as a job finds them."""

    def __init__(self, folder: Path) -> None:
        self.folder, job = folder, tiny_job(folder)
        whole = recipe("A script of your own", "python")
        assert whole.count("\n\n\nif __name__") == 1
        (folder / "train.py").write_text(whole.replace("\n\n\nif __name__", f"{_LEFT}\n\nif __name__"))
        small = f"--model {job.model} --data {job.data} --cache {job.cache} {_SMALL} --output {folder}/output"
        programs = {
            "python": f'{sys.executable} "$@"',
            "odc": f'{sys.executable} -m odc.cli "$@" {small}',
            "pip": "true",
        }
        (folder / "bin").mkdir()
        for name, program in programs.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\nexec {program}\n")
            (folder / "bin" / name).chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        path = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        return {**os.environ, **path, "PYTHONPATH": os.pathsep.join(one or "." for one in sys.path)}

    def start(self, command: Sequence[str], variables: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        """Start a command in the folder; what it prints is read from the process that is returned."""
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: Sequence[str], each: Sequence[Mapping[str, str]] = ({},)) -> None:
        """Run a command with each of the environments at once; all must end well."""
        started = [self.start(command, one) for one in each]
        try:
            printed = [process.communicate(timeout=400)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        codes = [process.returncode for process in started]
        assert not any(codes), (codes, [text[-3000:] for text in printed])

    def under_torchrun(self, ranks: int) -> list[str]:
        """What so many ranks of `train.py` leave."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        self.run([*torchrun, "train.py"])
        return self.left()

    def left(self) -> list[str]:
        """What the ranks of `train.py` have left, in rank order; gone afterwards."""
        files = sorted(self.folder.glob("rank-*"), key=lambda path: int(path.name[5:]))
        found = [path.read_text() for path in files]
        for path in files:
            path.unlink()
        return found
