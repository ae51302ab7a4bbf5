"""The examples with Hugging Face models, on two CPU ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: pip install 'odc-fsdp[transformers]'"
)


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def skip_tower(rank: int, world: int) -> tuple[list[float], list[float]]:
    """Losses of the example, and of the same samples on an unsharded model."""
    module = example("skip_tower")
    return module.main(), module.main(shard=False)


def test_a_tower_that_a_rank_never_enters_is_trained_as_if_all_samples_were_on_one(ranks) -> None:
    for ours, whole in ranks(2).run(skip_tower):
        assert ours == pytest.approx(whole, rel=1e-5) and ours[-1] != ours[0]


def generations(rank: int, world: int) -> tuple[list[list[int]], list[list[int]], int, int]:
    """Tokens that a sharded model and the whole one generate, this rank's forwards, and its epochs."""
    from odc import fully_shard
    from odc.blocks import blocks_of
    from odc.fsdp import root_of

    module = example("generate")
    prompts = [([5, 6, 7], 2 + 9 * rank), ([8, 9], 3 + 9 * rank)]
    model = module.build(None)
    whole = [module.continuation(model, prompt, most) for prompt, most in prompts]
    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    (first, forwards), (kept, _) = module.generate(model, prompts), module.generate(model, prompts, keep=True)
    assert first == kept, "keeping weights changes no token"
    return first, whole, forwards, root_of(model).minibatch.epoch


def test_ranks_generate_at_their_own_pace(ranks) -> None:
    found = ranks(2).run(generations)
    for rank, (ours, whole, forwards, epoch) in enumerate(found):
        assert ours == whole
        assert forwards == sum(map(len, ours)) == 5 + 18 * rank, "a forward a token, none for the other rank's"
        assert epoch == 1


def torchrun(tmp_path: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = [str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    script = str(EXAMPLES / f"{name}.py")
    return subprocess.run(
        [*command, script, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )


@pytest.mark.thorough
def test_rank_0_evaluates_alone_while_the_others_leave(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "generate")
    assert done.returncode == 0, done.stderr
    assert "rank 0 alone: loss" in done.stdout and done.stdout.count("forwards") == 4, done.stdout


@pytest.mark.thorough
def test_one_rank_has_no_image(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "no_image", "odc")
    assert done.returncode == 0, done.stderr
    norms = re.findall(r"rank (\d): vision gradient ([\d.]+)", done.stdout)
    assert sorted(rank for rank, _ in norms) == ["0", "1"] and len({norm for _, norm in norms}) == 1
    stuck = torchrun(tmp_path, "no_image", "fsdp2")
    assert stuck.returncode != 0 and "vision gradient" not in stuck.stdout, "docs/multimodal.md says that FSDP2 hangs"
