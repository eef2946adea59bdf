"""Marks, axes, colours and number formats of figures, in the page and as still SVG."""
