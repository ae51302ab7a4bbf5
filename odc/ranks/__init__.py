"""Rank processes on this machine, for launching jobs, for benchmarks and for tests."""
