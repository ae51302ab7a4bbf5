"""Adapters to other libraries. Each is optional, and nothing in odc but the command line imports them."""
