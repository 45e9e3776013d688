"""Modules of the two DLRM scripts: click data, embedding tables in several modes, the model."""
