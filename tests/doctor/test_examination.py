"""Probes that hang, crash, raise or chatter: each is one line of the report, and never the end of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from odc.doctor import PROBES, USES, Finding, Probe, State, examine, lacking, to_json

PATIENTS = """
import os, sys, time
from odc.doctor.finding import ok, absent

def well():
    print("a library's banner")
    sys.stderr.write("a warning\\n")
    return [ok("well", "fine"), absent("more", "not there", "get it", "cuda")]

def hangs():
    print("before", flush=True)
    time.sleep(600)

def aborts():
    os.abort()

def raises():
    raise RuntimeError("no such thing")

def silent():
    os._exit(0)
"""


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "patients_of_odc.py").write_text(PATIENTS)
    monkeypatch.syspath_prepend(tmp_path)


def probe(name: str, deadline_s: float = 100.0) -> Probe:
    return Probe(name, f"patients_of_odc:{name}", "cuda", deadline_s, hangs="reboot")


@pytest.mark.usefixtures("patients")
def test_bad_probes_are_lines_of_the_report() -> None:
    found = examine([probe("well"), probe("raises"), probe("aborts"), probe("silent")])
    assert [(one.what, one.state, one.use) for one in found] == [
        ("well", State.OK, "run"),
        ("more", State.ABSENT, "cuda"),
        ("raises", State.BROKEN, "cuda"),
        ("aborts", State.BROKEN, "cuda"),
        ("silent", State.BROKEN, "cuda"),
    ]
    assert "RuntimeError: no such thing" in found[2].found
    assert "code -6" in found[3].found
    assert all(one.do for one in found if one.state is not State.OK)


@pytest.mark.usefixtures("patients")
def test_a_hang_ends_at_its_deadline() -> None:
    begin = time.monotonic()
    (found,) = examine([probe("hangs", 2.0)])
    assert time.monotonic() - begin < 300, "it would have slept for 600 s"
    assert found == Finding("hangs", State.BROKEN, "no answer in 2 s", "cuda", "reboot")


def test_what_is_lacking_depends_on_what_is_needed() -> None:
    fine, no_gpu = Finding("a", State.OK, ""), Finding("b", State.ABSENT, "", "cuda", "buy one")
    assert lacking([fine, no_gpu], ["run"]) == []
    assert lacking([fine, no_gpu], ["run", "cuda"]) == [no_gpu]
    assert lacking([fine, no_gpu], ["run", "nvshmem"]) == [no_gpu], "there is no NVSHMEM without a device"


def test_json_holds_every_field() -> None:
    (one,) = json.loads(to_json([Finding("b", State.ABSENT, "none", "cuda", "buy one")]))
    assert one == {"what": "b", "state": "absent", "found": "none", "use": "cuda", "do": "buy one"}


def test_every_probe_has_a_use_that_is_explained() -> None:
    assert {one.use for one in PROBES} <= {*USES, "extras"}


def test_this_machine_can_run_odc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real probes of what `run` needs, in one process, as torch takes long to load: tests run here, so odc does."""
    wanted = [one.function.split(":") for one in PROBES if one.use == "run"]
    (tmp_path / "all_of_odc.py").write_text(
        f"from importlib import import_module\nfunctions = {wanted!r}\n"
        "def run():\n    return [found for at, name in functions for found in getattr(import_module(at), name)()]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = examine([Probe("all", "all_of_odc:run")])
    assert {one.what for one in found} >= {"system", "torch", "shared memory", "atomics", "robust mutex", "peers"}
    assert lacking(found, ["run"]) == []
