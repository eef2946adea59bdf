"""What every backend promises: rows of parameters, objectives, update programs, losses on features."""
