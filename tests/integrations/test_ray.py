"""The recipes for Ray: of docs/launchers.md, whose actors kill themselves or raise and are started again, and those of
docs/clusters.md, whose ranks train what ranks of torchrun do.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.clusters import ClusterFolder, recipe
from support.recovering import run, unequal

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: make test-integrations")

RANKS = 2
PAGE = Path(__file__).parents[2] / "docs" / "launchers.md"
TRAIN = """
import os
from pathlib import Path

import torch
from support import recovering


def train():
    deaths = [recovering.Death(0, 3, "clip"), recovering.Death(1, 5, "begin", "raise")]
    found = recovering.train(f"{Path(__file__).parent}/deaths", deaths, recovering.STEPS, None)
    torch.save(found, f"{Path(__file__).parent}/output/{os.environ['RANK']}.pt")
    return found["recoveries"]
"""


def test_ray_starts_actors_again(tmp_path: Path) -> None:
    found = re.search(r"## Ray\n.*?```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found and found[1].count("ray.init()") == 1
    for name in ("deaths", "output"):
        (tmp_path / name).mkdir()
    small = "ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)"
    (tmp_path / "job.py").write_text(found[1].replace("ray.init()", small))
    (tmp_path / "train.py").write_text(TRAIN)
    ended = subprocess.run(
        [sys.executable, tmp_path / "job.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "[1, 0]" in ended.stdout.splitlines(), "rank 0, whose second process saw the second death; rank 1"
    assert {path.name for path in (tmp_path / "deaths").iterdir()} == {"0.3.clip", "1.5.begin"}
    results = [torch.load(tmp_path / "output" / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    assert not unequal(results, run(tmp_path / "undisturbed", RANKS))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[str]]:
    """What so many ranks of torchrun return."""
    return functools.cache(ClusterFolder(tmp_path_factory.mktemp("torchrun")).under_torchrun)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("heading", "number"), [("Ray Train", "num_workers=2"), ("Ray actors", "world = 2")])
def test_ranks_of_ray_train_as_those_of_torchrun(
    heading: str, number: str, ranks: int, expected: Callable[[int], list[str]], tmp_path: Path
) -> None:
    folder, text = ClusterFolder(tmp_path), recipe(heading, "python")
    assert text.count(number) == 1
    text = text.replace("ray.init()\n", "").replace(number, number.replace("2", str(ranks)))
    small = "import ray\nray.init(num_cpus=5, include_dashboard=False, object_store_memory=80 * 2**20)\n"
    (tmp_path / "job.py").write_text(small + text)
    folder.run(["python", "job.py"], [{"HOME": str(tmp_path)}])
    assert folder.left() == expected(ranks)
