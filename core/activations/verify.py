"""Verification: what is read for the backward pass is compared with what was saved."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..engine.tensor_bits import as_integers
from ..errors import BitslabError
from .copies import SavedView

#: Between the steps whose originals are kept, when the caller names no number.
USUAL_EVERY = 16
#: Elements of which a checksum is made at once.
_PIECE = 1 << 20
_MULTIPLIER = -7046029254386353131  # odd, from the golden ratio


class VerifyError(BitslabError, RuntimeError):
    """A saved tensor came back with other bits."""


@dataclass(frozen=True)
class _Proof:
    checksum: torch.Tensor
    original: torch.Tensor | None


class Verifier:
    """Keeps a checksum of each saved tensor, and of every Nth pass the tensors themselves.

    Parameters
    ----------
    every : int
        Of so many passes one keeps the originals; 0 to verify nothing.

    Attributes
    ----------
    every : int
        As given.
    compared : int
        Number of tensors that were compared.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.compared = 0

    def saved(self, view: SavedView, t: torch.Tensor, pass_number: int) -> None:
        """Take the checksum of a tensor that is being saved."""
        if not self.every:
            return
        with torch.no_grad():
            original = t.detach().clone() if pass_number % self.every == 0 else None
            view.checksum = _Proof(checksum(t.detach()), original)

    def read(self, view: SavedView, t: torch.Tensor) -> None:
        """Compare a tensor that is being read; waits for the device.

        Raises
        ------
        VerifyError
            When it is another one.
        """
        proof = view.checksum
        if not isinstance(proof, _Proof) or view.copy.is_lossy:
            return
        self.compared += 1
        with torch.no_grad():
            if not torch.equal(checksum(t), proof.checksum):
                raise VerifyError(self._message(view, t, "its checksum differs"))
            if proof.original is not None and not torch.equal(_bits(t), _bits(proof.original)):
                raise VerifyError(self._message(view, t, "it differs from the original"))

    def _message(self, view: SavedView, t: torch.Tensor, what: str) -> str:
        by = view.operation or "no node"
        codec = "raw" if view.copy.codec is None else view.copy.codec.describe()
        return (
            f"verify: the tensor {list(t.shape)} {t.dtype} saved at {view.name!r}, output of {by}, "
            f"moved {codec}, came back with other bits: {what}"
        )


def checksum(t: torch.Tensor) -> torch.Tensor:
    """Return int64 ``[]`` that depends on each bit of a tensor and on where it stands."""
    flat = _bits(t).flatten()
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for begin in range(0, flat.shape[0], _PIECE):
        piece = flat[begin : begin + _PIECE].to(torch.int64)
        places = torch.arange(begin, begin + piece.shape[0], device=t.device)
        # Odd factors lose no bit; the sum is over integers modulo 2^64.
        total += (piece * ((2 * places + 1) * _MULTIPLIER)).sum()
    return total


def _bits(t: torch.Tensor) -> torch.Tensor:
    return as_integers(t.resolve_conj().resolve_neg().contiguous())
