"""Run torch's own FSDP2 tests over odc's `fully_shard`; see README.md beside this file."""

from __future__ import annotations

import argparse
import importlib.util
import io
import re
import sys
import time
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import selection  # noqa: E402
import substitution  # noqa: E402

PASSED, FAILED, SKIPPED, NOT_APPLICABLE = "passed", "failed", "skipped by torch", "not applicable"


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if every applicable test passed and there was one, 1 if not, 2 if the suite cannot be run."""
    options = _parser().parse_args(arguments)
    chosen = selection.read(options.not_applicable)
    if complaint := _complaint(options.suite, options.any_version):
        print(complaint, file=sys.stderr)
        return 2
    substitution.install(reference=options.reference)
    counts: Counter[str] = Counter()
    failed: list[str] = []
    for name, test in _tests(options.suite):
        if not selection.wanted(name, options.k):
            continue
        reason = chosen.reason(name)
        if options.list:
            print(f"{name}  {NOT_APPLICABLE}: {reason}" if reason else name)
            continue
        outcome, details = (NOT_APPLICABLE, reason or "") if reason else _run(test, options.timeout)
        counts[outcome] += 1
        if outcome is FAILED:
            failed.append(name)
            details = f"\n{details}"
        if outcome is not NOT_APPLICABLE or options.verbose:
            print(f"{outcome:>16}  {name}  {details}", flush=True)
    if options.list:
        return 0
    _print_summary(counts, failed, [] if options.k else chosen.unused())
    return 0 if counts[PASSED] and not failed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run torch's own FSDP2 tests over odc's fully_shard, on CPU.")
    parser.add_argument("suite", type=Path, help="test/distributed/_composable/fsdp of a pytorch source tree")
    parser.add_argument("-k", action="append", default=[], help="run only tests whose name holds this; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the tests and run none")
    parser.add_argument("--reference", action="store_true", help="run them over torch's own fully_shard")
    parser.add_argument("--any-version", action="store_true", help="run them although the versions differ")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test (300)")
    parser.add_argument("--not-applicable", type=Path, default=HERE / "not_applicable.toml", help="the list to use")
    parser.add_argument("--verbose", action="store_true", help="print the tests that do not apply, too")
    return parser


def _complaint(suite: Path, any_version: bool) -> str:
    """Why the suite cannot be run, empty if it can."""
    import torch

    if not list(suite.glob("test_*.py")):
        return f"{suite} holds no test_*.py: name test/distributed/_composable/fsdp of a pytorch source tree"
    if any_version:
        return ""
    version = suite.resolve().parents[3] / "version.txt"
    if not version.exists():
        return f"{version} is missing, so the version of these tests is unknown; --any-version runs them all the same"
    tests, installed = (re.findall(r"\d+", text)[:2] for text in (version.read_text(), torch.__version__))
    if tests != installed:
        return (
            f"these tests are of torch {'.'.join(tests)}, and torch {'.'.join(installed)} is installed; "
            "--any-version runs them all the same"
        )
    return ""


def _tests(suite: Path) -> Iterator[tuple[str, unittest.TestCase]]:
    """Every test by name, file by file. Importing a file may need a module that lies beside it."""
    sys.path.insert(0, str(suite))
    for path in sorted(suite.glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        try:
            with substitution.cpu_as_accelerator():
                spec.loader.exec_module(module)
        except (Exception, unittest.SkipTest) as error:
            yield f"{path.stem}::import", _raising(error)
            continue
        yield from ((_name(path, test), test) for test in _flat(unittest.defaultTestLoader.loadTestsFromModule(module)))


def _raising(error: BaseException) -> unittest.TestCase:
    def fail() -> None:
        raise error

    return unittest.FunctionTestCase(fail)


def _flat(tests: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in tests:
        if isinstance(test, unittest.TestSuite):
            yield from _flat(test)
        else:
            yield test


def _name(path: Path, test: unittest.TestCase) -> str:
    return f"{path.stem}::{type(test).__name__}::{test._testMethodName}"


def _run(test: unittest.TestCase, timeout: int) -> tuple[str, str]:
    """The outcome of one test, and its details."""
    from torch.testing._internal import common_distributed

    common_distributed.TIMEOUT_DEFAULT = timeout
    substitution.prepare(test)
    begin = time.monotonic()
    result = unittest.TextTestRunner(stream=io.StringIO(), verbosity=0).run(unittest.TestSuite([test]))
    if bad := [*result.failures, *result.errors]:
        return FAILED, "\n".join(text for _, text in bad)
    if result.skipped:
        return SKIPPED, result.skipped[0][1]
    return PASSED, f"{time.monotonic() - begin:.1f} s"


def _print_summary(counts: Counter[str], failed: list[str], unused: list[str]) -> None:
    for pattern in unused:
        print(f"names no test here: {pattern}")
    for name in failed:
        print(f"FAILED {name}")
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in (PASSED, FAILED, SKIPPED, NOT_APPLICABLE)))


if __name__ == "__main__":
    substitution.on_cpu()
    sys.exit(main())
