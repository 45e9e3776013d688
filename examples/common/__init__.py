"""Modules that several examples share: options and their checks, output, seeds, memory."""
