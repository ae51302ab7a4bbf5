"""Tests run with `Settings(check_protocol=True)`, without saying so."""

from __future__ import annotations

import dataclasses

from odc.settings import Settings


def check_protocol() -> None:
    """Have all settings that are made in this process from now on check the protocol, unless they say otherwise."""
    names = [field.name for field in dataclasses.fields(Settings)]
    defaults = list(Settings.__init__.__defaults__ or ())
    defaults[names.index("check_protocol") - len(names)] = True
    Settings.__init__.__defaults__ = tuple(defaults)
