"""Text of others as text that is safe to print and to paste. Nothing here knows of releases or patches."""
