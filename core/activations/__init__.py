"""Tensors that training keeps for its backward pass, moved to the host and back."""

from .lossy import Lossy, LossyError
from .offload import ActivationOffload, offload_activations
from .report import ActivationReport, SiteReport
from .sites import Site, conv_inputs
from .verify import VerifyError

__all__ = [
    "ActivationOffload",
    "ActivationReport",
    "Lossy",
    "LossyError",
    "Site",
    "SiteReport",
    "VerifyError",
    "conv_inputs",
    "offload_activations",
]
