"""Descriptions of federations in numbers, text and HTML."""
