"""Faces of tables and of mapped host memory that are torch tensors."""

from .feature_tensor import FeatureTensor, is_fact, name_of
from .unified_tensor import UnifiedTensor, unified

__all__ = [
    "FeatureTensor",
    "UnifiedTensor",
    "is_fact",
    "name_of",
    "unified",
]
