"""Layerwise strategies, one to a file, and the registry of their names."""
