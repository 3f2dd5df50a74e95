"""Stands in for the library of that name, with which ms-swift fetches pictures."""
