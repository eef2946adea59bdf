"""The audit of data before anything learns from them: what cannot be meant is refused, what may be wrong is noted."""
