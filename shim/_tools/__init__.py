"""The tools for people: the command line, doctor, audit, pins, generated pages."""
