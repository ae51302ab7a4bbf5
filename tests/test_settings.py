"""Twin of odc/settings.py."""

from __future__ import annotations

import datetime
import math
import re
import threading

import pytest

from odc import Settings

WRONG_RANGES = (29600, "29600-29607", (0, 9), (1, 65536), (2, 1), (1, 2, 3), (1, True), (1.0, 2.0))


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan, 1e12, True])
def test_a_timeout_that_no_timer_can_keep_is_refused_at_once(wrong: float) -> None:
    with pytest.raises(ValueError, match=f"timeout_s must be a positive number of seconds, .* not {wrong!r}"):
        Settings(timeout_s=wrong)


def test_the_longest_timeout_fits_into_every_timer() -> None:
    longest = Settings(timeout_s=10 * 365 * 24 * 3600.0).timeout_s
    assert threading.Lock().acquire(timeout=longest)
    assert datetime.timedelta(seconds=longest)
    assert threading.Event().wait(timeout=0) is False
    event = threading.Event()
    event.set()
    assert event.wait(timeout=longest)


@pytest.mark.parametrize(
    ("name", "wrong", "must_be"),
    [
        ("timeout_s", "600", "a positive number of seconds"),
        ("lost_after_s", "2", "a number of seconds, 1 to 3600"),
        ("lost_after_s", 0.5, "a number of seconds, 1 to 3600"),
        ("lost_after_s", math.inf, "a number of seconds, 1 to 3600"),
        ("lost_after_s", True, "a number of seconds, 1 to 3600"),
        ("reproducible", "no", "True or False"),
        ("trace", 0, "True or False"),
        ("prefetch", True, "a whole number of units, 0 or more"),
        ("copy_engine_bytes", 0, "a whole number of bytes, 1 or more"),
        ("queue_bytes", 1.5, "a whole number of bytes, 0 or more"),
        ("staging_block_bytes", "1M", "at least 4096 and a multiple of 64"),
        ("accumulate", None, "one of server, direct"),
        ("engine", "tcp", "one of auto, sockets, nixl"),
        ("memory", "torch", "one of driver, nvshmem"),
        ("nvshmem_bytes", -1, "a whole number of bytes, 0 or more"),
        ("address", 10, "a string"),
        *(("ports", wrong, "the first and the last of a range, 1 to 65535") for wrong in WRONG_RANGES),
    ],
)
def test_what_no_setting_can_be_is_refused_by_name(name: str, wrong: object, must_be: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be {must_be}.*, not {re.escape(repr(wrong))}$"):
        Settings(**{name: wrong})  # type: ignore[arg-type]


def test_a_way_to_accumulate_that_is_gone_names_its_replacement() -> None:
    with pytest.raises(ValueError, match="accumulate='per_source' is gone; reproducible=True makes"):
        Settings(accumulate="per_source")  # type: ignore[arg-type]
