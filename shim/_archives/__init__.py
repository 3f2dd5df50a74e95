"""Releases that are not installed: in a directory, a wheel, an sdist or a commit, read without unpacking them."""
