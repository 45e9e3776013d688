"""InvariantCodec: invariant bit packing of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch

from ....dtypes import dtype_from_name, dtype_name
from ....errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from ...kernels.format import CHUNK_BYTES, CODE_BITS, MAX_CLUSTERS, MAX_ROW_BYTES, RowLayout
from ...kernels.row_kernels import LayoutKernels, RowKernels
from ..base import (
    check_integer,
    check_rows_argument,
    check_tensor_argument,
    elements,
    rows_as_bytes,
)
from ..words import WordRowCodec
from .clusters import fit_clusters
from .layout import build_layout
from .plan_cache import PlanCache
from .planner import Options, choose_plan, fit_profile, refit_profile
from .profile import Profile
from .sample import Sample, draw_sample

Auto = Literal["auto"]


class InvariantCodec(WordRowCodec):
    """Invariant bit packing (IBP, EuroSys'26, section 4), extended.

    Bits of a chunk that take few values over all rows (the exponent of weights, the zeros of
    sparse features) are replaced by a short code; the others are kept as they are. Any row is
    decoded alone. Make one with `InvariantCodec.fit`.

    Parameters
    ----------
    profile : Profile
        Masks and values.
    row_shape : tuple of int
        Shape of a row.
    dtype : torch.dtype
        Dtype of its elements.

    Notes
    -----
    Immutable; threads may share it. The kernels' tables are made once for each device. What a GPU
    finds wrong while it decodes is raised by the next call on that GPU, in whichever thread.

    Examples
    --------
    >>> import torch, bitslab
    >>> rows = torch.randn(1000, 64).bfloat16()
    >>> codec = bitslab.InvariantCodec.fit(rows)
    >>> packed = codec.encode(rows)
    >>> torch.equal(codec.decode(packed), rows)
    True
    >>> torch.equal(codec.decode(packed, torch.tensor([3, -1])), rows[[3, -1]])
    True
    """

    name: ClassVar[str] = "ibp"
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    shares_rows: ClassVar[bool] = True

    def __init__(self, profile: Profile, row_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.profile = profile
        self.row_shape = tuple(row_shape)
        self.dtype = dtype
        if self.row_bytes != profile.format.row_bytes:
            raise ArgumentError(
                f"profile: made for rows of {profile.format.row_bytes} bytes, "
                f"{list(row_shape)} {dtype} has {self.row_bytes}"
            )

    # Fitting

    @classmethod
    def fit(
        cls,
        sample: torch.Tensor,
        *,
        chunk_bytes: int | Auto = "auto",
        code_bits: int | Auto = "auto",
        grouped: bool | Auto = "auto",
        uniform: bool | Auto = "auto",
        threshold: float | Auto = "auto",
        clusters: int = 1,
        seed: int = 0,
        n_rows: int | None = None,
        plans: PlanCache | None = None,
        kind: str = "",
    ) -> InvariantCodec:
        """Learn masks and values from sample rows.

        Options given are obeyed; "auto" is planned by counting in up to 4 MiB of the sample, where
        it lies: rows on a GPU remain there, and what comes back are counts, masks and values. The
        same rows give the same codec on each device. ``chunk_bytes=4, code_bits=1, grouped=False,
        uniform=False`` is the published IBP, with its sweep over thresholds.

        Parameters
        ----------
        sample : torch.Tensor
            ``[N, ...]`` of any dtype, on any device; a row is everything after the first
            dimension.
        chunk_bytes : {1, 2, 4, 8} or "auto"
            Bytes of a chunk, the unit that is compressed or not; must divide the row's bytes.
        code_bits : {1, 2, 3} or "auto"
            Bits of a participation code: 1, 3 or 7 values of the masked bits have one.
        grouped : bool or "auto"
            Whether 32 chunks that all take the most frequent value cost one bit.
        uniform : bool or "auto"
            One mask for all chunk positions, or one for each.
        threshold : float or "auto"
            A bit is invariant when at least this share of the sample agrees on it, 0.5 to 1
            (tau of IBP section 4.1).
        clusters : int
            Rows are grouped into up to this many clusters, 1 to 256, each with its own masks, if
            that makes the packed rows, their cluster ids and the profiles smaller.
        seed : int
            Seed of the choice of sample rows and of the first cluster centers.
        n_rows : int, optional
            Rows that will be encoded, to weigh the size of the profile; the sample's when left
            out.
        plans : PlanCache, optional
            Plans made before. One for rows of the same dtype, size and kind and the same options is
            checked first, which takes less time than a plan; else the plan made here is kept there.
            Not used with clusters.
        kind : str
            Kind of the rows, such as ``"k"`` and ``"v"``, where those of a kind share plans.

        Returns
        -------
        InvariantCodec

        Raises
        ------
        ArgumentError
            When an option is out of range, does not divide the row, or the sample is empty.
        ArgumentTypeError
            When `sample` is no tensor or an option has the wrong type.

        Notes
        -----
        Planning on a GPU waits for it a few times, until a few kilobytes have come back.
        """
        options = _checked_options(sample, chunk_bytes, code_bits, grouped, uniform, threshold)
        check_integer("clusters", clusters, range(1, MAX_CLUSTERS + 1))
        check_integer("seed", seed, range(1 << 63))
        if n_rows is not None:
            check_integer("n_rows", n_rows, range(1 << 63))
        if plans is not None and not isinstance(plans, PlanCache):
            raise ArgumentTypeError(f"plans: expected a PlanCache, got {type(plans).__name__}")
        row_shape = tuple(sample.shape[1:])
        row_bytes = elements(row_shape) * sample.dtype.itemsize
        drawn = draw_sample(rows_as_bytes(sample, row_bytes), seed)
        total = sample.shape[0] if n_rows is None else n_rows
        profile = None
        if clusters > 1:
            drawn = Sample(drawn.rows.cpu())
            plan = choose_plan(drawn, sample.dtype, options, total)
            profile = fit_clusters(drawn, sample.dtype, plan, clusters, seed, total)
        elif plans is not None:
            plan = plans.choose(kind, drawn, sample.dtype, options, total)
        else:
            plan = choose_plan(drawn, sample.dtype, options, total)
        return cls(profile or fit_profile(drawn, plan), row_shape, sample.dtype)

    def refitted(self, sample: torch.Tensor) -> InvariantCodec:
        """Return a codec with the same plan and masks, and the values that suit other rows.

        For tensors that differ in scale rather than in kind, as the weights of a model do; far
        quicker than a plan of their own, which may save more.

        Parameters
        ----------
        sample : torch.Tensor
            ``[N, *row_shape]`` of the codec's dtype, N at least 1, on any device.

        Raises
        ------
        ArgumentError
            When there are no rows, rows have another shape, or the codec has clusters.
        """
        check_rows_argument(self, sample)
        if sample.shape[0] == 0:
            raise ArgumentError("sample: no rows; values are learnt from at least one")
        if self.clusters > 1:
            raise ArgumentError(f"refitted(): this codec has {self.clusters} clusters, expected 1")
        rows = rows_as_bytes(sample, self.row_bytes).contiguous()
        return InvariantCodec(refit_profile(rows, self.profile), self.row_shape, self.dtype)

    # Properties

    @property
    def clusters(self) -> int:
        """Number of profiles that rows choose from."""
        return self.profile.format.clusters

    @property
    def profile_bytes(self) -> int:
        """Bytes of masks and values."""
        return self.profile.nbytes

    def describe(self) -> str:
        """Return the plan in a few words: ``ibp 2B k3 uniform``."""
        f = self.profile.format
        words = [self.name, f"{f.chunk_bytes}B", f"k{f.code_bits}"]
        words.append("uniform" if f.uniform else "positional")
        words += ["grouped"] if f.grouped else []
        words += [f"x{f.clusters}"] if f.clusters > 1 else []
        return " ".join(words)

    # Files and wires

    def to_config(self) -> dict[str, Any]:
        """Return row shape, dtype and profile as JSON-able values."""
        return {
            "row_shape": list(self.row_shape),
            "dtype": dtype_name(self.dtype),
            "profile": self.profile.to_config(),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> InvariantCodec:
        """Build the codec that `to_config` described.

        Raises
        ------
        CorruptedDataError
            When the configuration is damaged.
        """
        if not isinstance(config, Mapping):
            raise CorruptedDataError(f"ibp: configuration is {config!r:.60}, expected a mapping")
        shape = config.get("row_shape")
        if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
            raise CorruptedDataError(f"ibp: row_shape is {shape!r}, expected positive integers")
        dtype = dtype_from_name(config.get("dtype", ""))
        described = config.get("profile")
        if not isinstance(described, dict):
            raise CorruptedDataError(f"ibp: profile is {described!r:.60}, expected a mapping")
        profile = Profile.from_config(described)
        if elements(shape) * dtype.itemsize != profile.format.row_bytes:
            raise CorruptedDataError("ibp: row_shape and dtype do not fit the profile")
        return cls(profile, tuple(shape), dtype)

    @cached_property
    def _layout(self) -> RowLayout:
        return build_layout(self.profile.format, self.profile.masks, self.profile.values)

    def row_layout(self) -> RowLayout:
        """Return the tables that the kernels read, on the CPU."""
        return self._layout

    def kernels(self, device: torch.device) -> RowKernels:
        """Return this package's kernels with the codec's tables on a device, copied anew there."""
        return LayoutKernels(self._layout if device.type == "cpu" else self._layout.to(device))


def _checked_options(
    sample: torch.Tensor,
    chunk_bytes: int | Auto,
    code_bits: int | Auto,
    grouped: bool | Auto,
    uniform: bool | Auto,
    threshold: float | Auto,
) -> Options:
    """Check the arguments of `InvariantCodec.fit`."""
    check_tensor_argument("sample", sample)
    if sample.dim() < 1 or sample.numel() == 0:
        raise ArgumentError(f"sample: shape {list(sample.shape)}; needs at least one row and byte")
    row_bytes = sample.numel() // sample.shape[0] * sample.dtype.itemsize
    if row_bytes > MAX_ROW_BYTES:
        raise ArgumentError(f"sample: rows of {row_bytes} bytes, accepted are {MAX_ROW_BYTES}")
    if chunk_bytes != "auto":
        if type(chunk_bytes) is not int or chunk_bytes not in CHUNK_BYTES:
            raise ArgumentError(f"chunk_bytes: {chunk_bytes!r}, accepted are 1, 2, 4, 8, 'auto'")
        if row_bytes % chunk_bytes:
            raise ArgumentError(f"chunk_bytes: {chunk_bytes} does not divide {row_bytes}-byte rows")
    if code_bits != "auto" and (type(code_bits) is not int or code_bits not in CODE_BITS):
        raise ArgumentError(f"code_bits: {code_bits!r}, accepted are 1, 2, 3, 'auto'")
    for name, flag in (("grouped", grouped), ("uniform", uniform)):
        if flag != "auto" and not isinstance(flag, bool):
            raise ArgumentTypeError(f"{name}: {flag!r}, accepted are True, False, 'auto'")
    if threshold != "auto":
        if not isinstance(threshold, (int, float)) or isinstance(threshold, bool):
            raise ArgumentTypeError(f"threshold: {threshold!r}, accepted are 0.5 to 1, 'auto'")
        if math.isnan(threshold) or not 0.5 <= threshold <= 1:
            raise ArgumentError(f"threshold: {threshold}, accepted are 0.5 to 1, 'auto'")
    return Options(
        None if chunk_bytes == "auto" else chunk_bytes,
        None if code_bits == "auto" else code_bits,
        None if grouped == "auto" else grouped,
        None if uniform == "auto" else uniform,
        None if threshold == "auto" else float(threshold),
    )
