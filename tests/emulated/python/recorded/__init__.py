"""Hooks that note what orders threads and what they access, for the happens-before checker."""
