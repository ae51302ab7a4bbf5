"""Seams into other libraries, each optional: nothing in odc but the command line imports them."""
