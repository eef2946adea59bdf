"""Promises of every backend: rows of parameters, objectives, update programs, feature losses."""
