"""The models that come with kinfed; kinfed.engine.models names them."""
