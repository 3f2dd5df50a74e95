"""Stands in for the library of that name, which needs Arrow: trainers read data with it, and no test here does."""
