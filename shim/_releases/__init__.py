"""What a release is, read as text: versions, files, trees, wheels, fingerprints."""
