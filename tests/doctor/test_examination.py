"""Probes that hang, crash, raise or chatter: each is one line of the report, and never the end of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from odc.doctor import USES, Check, Finding, State, all_checks, examine, known_uses, lacking, to_json

PATIENTS = """
import os, sys, time
from odc.doctor.examination import Broken, Missing

def well(name="fine"):
    print("a library's banner", end="")
    sys.stderr.write("a warning\\n")
    return name

def missing():
    raise Missing("not there")

def unfit():
    raise Broken("too old")

def raises():
    raise RuntimeError("no such thing")

def aborts():
    os.abort()

def hangs():
    time.sleep(600)
"""


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "patients_of_odc.py").write_text(PATIENTS)
    monkeypatch.syspath_prepend(tmp_path)


def check(name: str, deadline_s: float = 100.0) -> Check:
    return Check(name, "cuda", f"patients_of_odc:{name}", "reboot", deadline_s)


@pytest.mark.usefixtures("patients")
def test_bad_probes_are_lines_of_the_report() -> None:
    names = ["well", "missing", "aborts", "unfit", "raises", "no_probe", "well:in a process of its own"]
    found = examine([check(name) for name in names])
    assert [(one.what, one.state, one.do) for one in found] == [
        (names[0], State.OK, ""),
        (names[1], State.ABSENT, "reboot"),
        (names[2], State.BROKEN, "reboot"),
        (names[3], State.BROKEN, "reboot"),
        (names[4], State.BROKEN, "reboot"),
        (names[5], State.BROKEN, "reboot"),
        (names[6], State.OK, ""),
    ]
    texts = [one.found for one in found]
    assert texts[:2] == ["fine", "not there"] and texts[6] == "in a process of its own"
    assert "code -6" in texts[2]
    assert texts[3:5] == ["too old", "RuntimeError: no such thing"]


@pytest.mark.usefixtures("patients")
def test_a_hang_ends_at_its_deadline() -> None:
    begin = time.monotonic()
    well, hangs = examine([check("well", 10.0), check("hangs", 10.0)])
    assert time.monotonic() - begin < 300, "it would have slept for 600 s"
    assert well.state is State.OK
    assert hangs == Finding("hangs", State.BROKEN, "no answer in 10 s", "cuda", "reboot")


def test_what_is_lacking_depends_on_what_is_needed() -> None:
    fine, no_gpu = Finding("a", State.OK, ""), Finding("b", State.ABSENT, "", "cuda", "buy one")
    assert lacking([fine, no_gpu], ["run"]) == []
    assert lacking([fine, no_gpu], ["run", "cuda"]) == [no_gpu]
    assert lacking([fine, no_gpu], ["run", "nvshmem"]) == [no_gpu], "there is no NVSHMEM without a device"


def test_json_holds_every_field() -> None:
    (one,) = json.loads(to_json([Finding("b", State.ABSENT, "none", "cuda", "buy one")]))
    assert one == {"what": "b", "state": "absent", "found": "none", "use": "cuda", "do": "buy one"}


def test_every_check_has_a_use_and_an_advice() -> None:
    assert {one.use for one in all_checks()} == known_uses() >= USES.keys()
    assert all(one.advice for one in all_checks())


def test_this_machine_can_run_odc() -> None:
    """The real probes of what `run` needs: tests run here, so odc does."""
    found = examine([one for one in all_checks() if one.use == "run"])
    assert {one.what for one in found} == {"system", "torch", "shared memory", "atomics", "robust mutex", "peers"}
    assert lacking(found, ["run"]) == []
