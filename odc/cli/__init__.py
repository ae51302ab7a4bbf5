"""The command line: `odc train | compare | plan | simulate | status`."""

from odc.cli.entry import main

__all__ = ["main"]
