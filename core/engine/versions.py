"""How often a tensor was changed in place, which torch counts and gives no public name."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

#: Returns how often a tensor was changed in place, its views and its root included. No function of
#: Python: it is asked for each tensor that autograd saves.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
