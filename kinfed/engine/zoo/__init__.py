"""The models that come with kinfed; kinfed.engine.zoo.models names them."""
