"""Any module as rows of parameters: layout, buffers, randomness by key, trial of a model."""
