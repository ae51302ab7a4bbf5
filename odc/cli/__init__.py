"""The command line: `odc train | compare | plan | simulate | bench | doctor | status`."""

from odc.cli.entry import main

__all__ = ["main"]
