"""The board: a local page with all runs of a folder and a live view of each. It reads files and writes none."""
