"""Personal models that are more than one row of parameters."""
