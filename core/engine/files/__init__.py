"""Files: written whole or not at all, the same bytes for the same content, and locks on them."""

from .file_locks import check_free
from .new_file import NewFile, replacing

__all__ = [
    "NewFile",
    "check_free",
    "replacing",
]
