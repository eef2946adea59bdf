"""kinfed: personalized federated learning, one good model per client."""
