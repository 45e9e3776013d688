"""The version of the package, for parts that say it without importing the whole."""

__version__ = "0.1.0"
