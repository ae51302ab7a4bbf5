"""The runner of torch's FSDP2 tests, tried on a made-up suite: no source tree of pytorch is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LIST = HERE / "not_applicable.toml"

# As torch's files are written: names taken by value at import, a base class from torch's own harness.
SUITE = """
import unittest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestMultiThread


class TestProcesses(FSDPTest):
    @property
    def world_size(self):
        return min(4, torch.cpu.device_count())

    @skip_if_lt_x_gpu(2)
    def test_trains(self):
        assert dist.get_world_size() == 2
        assert fully_shard.__module__ == MODULE, fully_shard.__module__
        model = torch.nn.Linear(3, 3)
        fully_shard(model)
        assert isinstance(model, FSDPModule)
        model(torch.ones(1, 3)).sum().backward()
        assert model.weight.grad is not None

    @skip_if_lt_x_gpu(3, allow_cpu=True)
    def test_three_ranks(self):
        assert dist.get_world_size() == 3

    def test_fails_on_one_rank(self):
        assert self.rank == 0, "this rank fails"


class TestMany(FSDPTest):
    @property
    def world_size(self):
        return 3

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_two_do(self):
        assert dist.get_world_size() == 2

    def test_three_are_asked_for(self):
        assert dist.get_world_size() == 3


class TestThreads(FSDPTestMultiThread):
    def test_ranks_are_processes(self):
        import os
        pids = [None] * self.world_size
        dist.all_gather_object(pids, os.getpid())
        assert len(set(pids)) == self.world_size == 2


class TestPlain(unittest.TestCase):
    def test_passes(self):
        self.assertTrue(True)

    @unittest.skip("not today")
    def test_skipped(self):
        raise AssertionError

    def test_not_applicable(self):
        raise AssertionError("it was run")
"""
STUB = """
import unittest
ACCEPT = False
class TestCase(unittest.TestCase):
    def assertExpectedInline(self, *args, **kwargs):
        raise NotImplementedError
"""
EXCLUDED = """
[[exclusion]]
reason = "It is made up."
tests = ["*::TestPlain::test_not_applicable", "*::TestOfAnotherVersion::*"]
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A tree as pytorch's, and beside it a stand-in for the one library that torch's harness needs."""
    folder = tmp_path / "pytorch/test/distributed/_composable/fsdp"
    folder.mkdir(parents=True)
    (folder / "test_made_up.py").write_text(f"MODULE = 'odc.fsdp.call'\n{SUITE}")
    (tmp_path / "expecttest.py").write_text(STUB)
    (tmp_path / "excluded.toml").write_text(EXCLUDED)
    return folder


def run(suite: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    top = suite.parents[4]
    path = os.pathsep.join([str(HERE.parents[1]), str(top)])
    command = [sys.executable, str(HERE / "run.py"), str(suite), "--not-applicable", str(top / "excluded.toml")]
    return subprocess.run(
        [*command, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def outcomes(output: str) -> dict[str, str]:
    """By test, without its file: the first words of its line."""
    lines = [line for line in output.splitlines() if "  test_made_up::" in line]
    return {line.split("::", 1)[1].split()[0]: line.split("  test_made_up::")[0].strip() for line in lines}


def test_every_test_has_its_outcome_and_one_failure_is_red(suite: Path) -> None:
    (suite / "test_broken.py").write_text("import there_is_no_such_module\n")
    done = run(suite, "--any-version", "--verbose")
    assert "failed  test_broken::import" in done.stdout and "there_is_no_such_module" in done.stdout
    assert outcomes(done.stdout) == {
        "TestProcesses::test_trains": "passed",
        "TestProcesses::test_three_ranks": "passed",
        "TestProcesses::test_fails_on_one_rank": "failed",
        "TestMany::test_two_do": "passed",
        "TestMany::test_three_are_asked_for": "passed",
        "TestThreads::test_ranks_are_processes": "passed",
        "TestPlain::test_passes": "passed",
        "TestPlain::test_skipped": "skipped by torch",
        "TestPlain::test_not_applicable": "not applicable",
    }, done.stdout + done.stderr
    assert "this rank fails" in done.stdout
    assert done.stdout.splitlines()[-1] == "6 passed, 2 failed, 1 skipped by torch, 1 not applicable"
    assert "names no test here: *::TestOfAnotherVersion::*" in done.stdout
    assert "FAILED test_made_up::TestProcesses::test_fails_on_one_rank" in done.stdout
    assert done.returncode == 1


def test_what_passes_is_green(suite: Path) -> None:
    done = run(suite, "--any-version", "-k", "test_passes", "-k", "test_skipped")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(outcomes(done.stdout)) == {"TestPlain::test_passes", "TestPlain::test_skipped"}


@pytest.mark.thorough
def test_the_reference_is_torchs_own(suite: Path) -> None:
    done = run(suite, "--any-version", "-k", "test_trains", "--reference")
    assert done.returncode == 1
    assert "AssertionError: torch.distributed.fsdp" in done.stdout, done.stdout + done.stderr


@pytest.mark.thorough
def test_a_run_in_which_nothing_passed_is_red(suite: Path) -> None:
    assert run(suite, "--any-version", "-k", "test_skipped").returncode == 1


def test_tests_of_another_version_are_refused(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    import run as runner

    version, installed = tmp_path / "pytorch/version.txt", ".".join(torch.__version__.split(".")[:2])
    assert "version.txt is missing" in runner._complaint(suite, any_version=False)
    version.write_text("1.2.0a0\n")
    assert "these tests are of torch 1.2, and torch" in runner._complaint(suite, any_version=False)
    assert runner._complaint(suite, any_version=True) == ""
    version.write_text(f"{installed}.9a0\n")
    assert runner._complaint(suite, any_version=False) == ""
    assert "holds no test_*.py" in runner._complaint(tmp_path, any_version=True)


def test_the_list_has_a_reason_for_every_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    import selection

    assert all(len(exclusion.reason.split()) > 4 for exclusion in selection.read(LIST).exclusions)
    for bad in (
        'tests = ["*::A::b"]',
        'reason = "Why not."',
        'reason = "Why not."\ntests = ["a", "a"]',
    ):
        path = tmp_path / "bad.toml"
        path.write_text(f"[[exclusion]]\n{bad}\n")
        with pytest.raises(ValueError, match=r"bad.toml: "):
            selection.read(path)


def test_a_pattern_names_whole_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    import selection

    chosen = selection.Selection([selection.Exclusion("Why not.", ("file::Class::test_a", "*::Other::*"))])
    assert chosen.reason("file::Class::test_a") == "Why not."
    assert chosen.reason("file::Class::test_a_b") is None
    assert chosen.unused() == ["*::Other::*"]
    assert chosen.reason("more::Other::test") == "Why not."
    assert chosen.unused() == []
