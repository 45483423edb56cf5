"""Starts, watches, restarts and stops worker processes. Loads no framework."""
