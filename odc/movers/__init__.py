"""Data movers: how bytes are copied and added, one file for each kind of memory."""
