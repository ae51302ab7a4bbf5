"""Jobs: one frame for training, comparing and measuring, and a folder for each workload."""
