"""Applying shim in every process of a job."""
