"""Scaffolding that tests share: rank processes, members of a job by hand, tiny models and jobs."""
