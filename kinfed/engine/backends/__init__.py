"""Backends in torch: stacked layers, convolutions, recurrent nets, rows, vmap."""
