"""Supervised fine-tuning of a causal language model (`odc train`)."""
