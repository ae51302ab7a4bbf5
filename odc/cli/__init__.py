"""The command line of odc."""

from odc.cli.entry import main

__all__ = ["main"]
