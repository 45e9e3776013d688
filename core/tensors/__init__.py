"""Faces of tables and of mapped host memory that are torch tensors."""
