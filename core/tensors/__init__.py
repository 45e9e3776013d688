"""Faces of tables and of mapped host memory that are torch tensors."""

from .feature_tensor import FeatureTensor, is_fact, name_of

__all__ = [
    "FeatureTensor",
    "is_fact",
    "name_of",
]
