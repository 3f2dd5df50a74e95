"""What people call: the command line, doctor, audit, pins, generated pages."""
