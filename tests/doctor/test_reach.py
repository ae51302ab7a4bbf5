"""`odc doctor --reach`: hosts that reach each other, and one that another does not reach."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import pytest
from support.hosts import Hosts, PerHost, need_hosts, places_of

from odc.cli import main
from odc.doctor.reach import look
from odc.errors import ConfigError
from odc.settings import Settings

COMMAND = (sys.executable, "-m", "odc.cli", "doctor", "--reach")


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(3) as hosts:
        yield hosts


_runs = itertools.count()


def run(hosts: Hosts, per_host: PerHost = 1) -> list[tuple[int, str]]:
    """Exit code and output of every process, as a launcher with an agent's store starts them."""
    started, run = [], str(next(_runs))
    for rank, (host, _) in enumerate(places_of(per_host, len(hosts))):
        environment = {**hosts.rank_environment(rank, per_host), "TORCHELASTIC_RESTART_COUNT": run, "COLUMNS": "250"}
        started.append(hosts[host].command(*COMMAND, env=environment))
    texts = [process.communicate()[0] for process in started]
    lines = ["".join(line for line in text.splitlines(True) if "[c10d]" not in line) for text in texts]
    return [(process.returncode, text) for process, text in zip(started, lines, strict=True)]


def test_hosts_that_reach_each_other(three: Hosts) -> None:
    (code, text), *others = run(three, (2, 1, 1))
    assert code == 0, text
    assert all(other == (0, "") for other in others), "one process speaks for all"
    for number, rank in enumerate((0, 2, 3)):
        assert f"│ {number}    │ {rank}    │ host{number} │ {three[number].address}" in text
    assert text.count("│ ok") == 6 and "eth0" in text and "1500" in text


def test_a_host_that_one_does_not_reach_is_named_with_the_way(three: Hosts) -> None:
    route = ("unreachable", three[2].address)
    assert three[1].command("ip", "route", "add", *route).communicate()[0] == ""
    try:
        (code, text), *_ = run(three)
    finally:
        three[1].command("ip", "route", "del", *route).communicate()
    assert code == 1, text
    failed = [line.split("│") for line in text.splitlines() if "connecting to rank" in line]
    assert [way[1:3] for way in failed] in ([[" 1    ", " 2  "]], [[" 1    ", " 2  "], [" 2    ", " 1  "]]), text
    assert text.count("│ ok") == 6 - len(failed)


def test_a_path_that_loses_large_packets_is_no_path(three: Hosts) -> None:
    """As where a switch on the way has a smaller MTU; here packets above 1000 bytes do not leave host 2."""
    small = ("replace", "dev", "eth0", "root", "tbf", "rate", "1gbit", "burst", "1000", "latency", "50ms")
    assert three[2].command("tc", "qdisc", *small).communicate()[0] == ""
    try:
        (code, text), *_ = run(three)
    finally:
        three[2].command("tc", "qdisc", "del", "dev", "eth0", "root").communicate()
    assert code == 1, text
    lost = [line.split("│") for line in text.splitlines() if "single bytes come back, 256 KiB do not" in line]
    assert {2} <= {int(end) for way in lost for end in way[1:3]} and len(lost) == 4, text
    assert text.count("│ ok") == 2


def test_without_a_launcher_or_on_one_host_it_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="start it on every host, by the launcher of the job"):
        look(Settings())
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--reach"])
    assert ended.value.code == 2
    assert "start it on every host" in capsys.readouterr().err
