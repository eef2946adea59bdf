"""What the files of several methods use."""
