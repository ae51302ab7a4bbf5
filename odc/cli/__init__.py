"""The command line: `odc train | compare | simulate | status`."""

from odc.cli.entry import main

__all__ = ["main"]
