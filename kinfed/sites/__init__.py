"""From a table with a column of sites to a model per site, chosen, explained and ready to use (`kinfed fit`)."""
