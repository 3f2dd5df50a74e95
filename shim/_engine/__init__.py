"""The engine: writes patches into the process, reads them back, and takes them back."""
