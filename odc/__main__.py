"""`python -m odc`, the same as the `odc` command."""

from __future__ import annotations

from odc.cli.entry import main

if __name__ == "__main__":
    main()
