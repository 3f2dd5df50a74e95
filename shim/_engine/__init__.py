"""What is written into the process, read back and taken back."""
