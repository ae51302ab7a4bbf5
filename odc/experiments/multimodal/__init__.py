"""A multimodal run: vision, audio and language phases, each balanced on its own (`odc train-mm`)."""
