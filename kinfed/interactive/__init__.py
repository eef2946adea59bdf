"""kinfed for people who work in Python, in a notebook or a script: what `kinfed.run` shows while it runs, and results
as tables, figures and pages. The command line is the sibling of this room."""
