"""Ranks that die at random moments, 1 to 3 at once (see `support.random_deaths`, which does any number of these)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hosts import Hosts, need_hosts
from support.random_deaths import Site, die_at_random
from support.recovering import COMMON, unequal


@pytest.fixture(scope="module", params=["1x3", pytest.param("2x2", marks=pytest.mark.thorough)])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    count, per_host = map(int, request.param.split("x"))
    if count == 1:
        yield Site(None, per_host)
        return
    need_hosts()
    with Hosts(count) as hosts:
        yield Site(hosts, per_host, COMMON._replace(changes="on"))


@pytest.fixture(scope="module")
def undisturbed(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return site.run(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("seed", range(2))
def test_a_job_survives_deaths_at_random_moments(seed: int, site: Site, undisturbed: Any, tmp_path: Path) -> None:
    found = die_at_random(site, tmp_path / "deaths", seed)
    assert list((tmp_path / "deaths").iterdir())
    assert not unequal(found, undisturbed)
