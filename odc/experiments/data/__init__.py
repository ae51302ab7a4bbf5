"""Training data: sources, tokenizers, packing and the order of samples."""
