"""Commands of deployments: `kinfed deploy`, and what a node keeps (`vault`) and has sent (`audit`)."""
