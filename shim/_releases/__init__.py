"""Releases, read as text: versions, files, trees, wheels, fingerprints."""
