"""Examples in memory: features, targets, batches and their draws."""
