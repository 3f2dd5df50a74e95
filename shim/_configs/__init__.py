"""Reading the configuration of a trainer: YAML, shell and Python files, and one table of settings per trainer."""
