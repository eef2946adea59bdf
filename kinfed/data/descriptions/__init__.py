"""What a federation is like, in numbers, text and HTML."""
