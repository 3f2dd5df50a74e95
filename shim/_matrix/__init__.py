"""The rules of version_matrix.yaml and the pins: model, loader, checks, cells."""
