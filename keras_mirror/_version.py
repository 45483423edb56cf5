"""The version, where a build can read it without importing a framework."""

__version__ = "0.1.0"
