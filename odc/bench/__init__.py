"""Microbenchmarks: `odc bench`, and what the benchmarks of the repository's bench/ folder are made of."""
