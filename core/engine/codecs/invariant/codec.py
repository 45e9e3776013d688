"""InvariantCodec: invariant bit packing of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch

from ....dtypes import dtype_from_name, dtype_name
from ....errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from ...kernels import Kernels, cpu, kernels_for
from ...kernels.format import (
    BLOCK_ROWS,
    CHUNK_BYTES,
    CODE_BITS,
    MAX_CLUSTERS,
    MAX_ROW_BYTES,
    PAD_WORDS,
    RowLayout,
    RowStorage,
    bases_of_rows,
    ceil_div,
    unsigned_lengths,
    words_of_rows,
)
from ...transfer.across import Via, decode_across
from ..base import (
    PackedRows,
    RowCodec,
    bits_in_order,
    check_indices_argument,
    check_out_argument,
    check_packed_argument,
    check_range_argument,
    check_rows_argument,
    check_tensor_argument,
    elements,
    raise_bad_index,
    rows_as_bytes,
)
from .clusters import fit_clusters
from .layout import build_layout
from .planner import Options, choose_plan, draw_sample, fit_profile, refit_profile
from .profile import Profile

Auto = Literal["auto"]


class InvariantCodec(RowCodec):
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

    def __init__(self, profile: Profile, row_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.profile = profile
        self.row_shape = tuple(row_shape)
        self.dtype = dtype
        if self.row_bytes != profile.format.row_bytes:
            raise ArgumentError(
                f"profile: made for rows of {profile.format.row_bytes} bytes, "
                f"{list(row_shape)} {dtype} has {self.row_bytes}"
            )
        layout = build_layout(profile.format, profile.masks, profile.values)
        self._layouts: dict[torch.device, RowLayout] = {torch.device("cpu"): layout}

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
    ) -> InvariantCodec:
        """Learn masks and values from sample rows.

        Options given are obeyed; "auto" is planned by the exact packed size of up to 4 MiB of the
        sample. ``chunk_bytes=4, code_bits=1, grouped=False, uniform=False`` is the published IBP,
        with its sweep over thresholds.

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

        Returns
        -------
        InvariantCodec

        Raises
        ------
        ArgumentError
            When an option is out of range, does not divide the row, or the sample is empty.
        ArgumentTypeError
            When `sample` is no tensor or an option has the wrong type.
        """
        options = _checked_options(sample, chunk_bytes, code_bits, grouped, uniform, threshold)
        _check_integer("clusters", clusters, range(1, MAX_CLUSTERS + 1))
        _check_integer("seed", seed, range(1 << 63))
        if n_rows is not None:
            _check_integer("n_rows", n_rows, range(1 << 63))
        row_shape = tuple(sample.shape[1:])
        row_bytes = elements(row_shape) * sample.dtype.itemsize
        drawn = draw_sample(rows_as_bytes(sample, row_bytes), seed)
        total = sample.shape[0] if n_rows is None else n_rows
        plan = choose_plan(drawn, sample.dtype, options, total)
        profile = None
        if clusters > 1:
            profile = fit_clusters(drawn, sample.dtype, plan, clusters, seed, total)
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
        rows = rows_as_bytes(sample, self.row_bytes).cpu().contiguous()
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

    def row_metadata_bytes(self, n_rows: int) -> int:
        """Return the bytes of offsets, lengths and cluster ids of `n_rows` rows."""
        return self.profile.format.row_metadata_bytes(n_rows)

    # Encoding and decoding

    def encode(self, rows: torch.Tensor) -> PackedRows:
        """Pack rows; those that would not shrink are kept raw.

        Parameters
        ----------
        rows : torch.Tensor
            ``[N, *row_shape]`` of the codec's dtype, on any device; the result is on the same.

        Returns
        -------
        PackedRows
            Parts ``words``, ``bases``, ``lengths`` and, with clusters, ``row_clusters`` (see
            `bitslab.engine.kernels.format.RowStorage`).

        Notes
        -----
        On a GPU this waits for the packed size once, to allocate the result.
        """
        check_rows_argument(self, rows)
        kernels, layout = self._on(rows.device)
        f = layout.format
        data = rows_as_bytes(rows, f.row_bytes)
        n = rows.shape[0]
        lengths, row_clusters = kernels.packed_words(data, layout)
        bases, facts = _offsets(lengths, f.row_words)
        data_words = kernels.encode_rows(
            data, layout, lengths, row_clusters, bases, facts["n_words"]
        )
        parts = {"words": data_words, "bases": bases, "lengths": lengths}
        if f.clusters > 1:
            parts["row_clusters"] = row_clusters
        return PackedRows(n, parts, facts)

    def decode(
        self,
        packed: PackedRows,
        indices: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
        via: Via = "auto",
        sm_budget: int | None = None,
    ) -> torch.Tensor:
        """Unpack rows.

        Parameters
        ----------
        packed : PackedRows
            What this codec's `encode` returned, on a CPU or GPU.
        indices : torch.Tensor, optional
            Integers ``[n]``, the rows wanted; negative ones count from the end. All rows, or
            those from `start` to `stop`, when left out.
        out : torch.Tensor, optional
            ``[n, *row_shape]`` of the codec's dtype to write to, on the device of `packed`, or on
            a GPU when `packed` is in host memory: then the packed bytes cross the link and are
            unpacked there.
        start, stop : int
            Range of rows, when `indices` is left out.
        via : {"auto", "copy-engine", "zero-copy"}
            How packed rows in host memory reach a GPU: copied by the copy engine and decoded piece
            by piece, or read by the decoding kernel itself. "auto" copies, except rows chosen by
            index.
        sm_budget : int, optional
            Decoding on a GPU starts no more blocks than this many multiprocessors hold; all when
            left out.

        Returns
        -------
        torch.Tensor
            `out`, or a new tensor.

        Raises
        ------
        IndexRangeError
            When an index is out of range; `out` is untouched. With indices on a GPU the error
            comes from the next call, or from `bitslab.raise_pending_errors`, because decoding
            never waits for the GPU.
        CorruptedDataError
            When packed data is damaged; `out` is untouched on the CPU.
        """
        storage = self._storage(packed)
        n_rows = packed.n_rows
        target = packed.device
        if out is not None:
            check_tensor_argument("out", out)
            target = out.device
        if via not in get_args(Via):
            raise ArgumentError(f"via: {via!r}, accepted are {', '.join(get_args(Via))}")
        if sm_budget is not None:
            _check_integer("sm_budget", sm_budget, range(1, 1 << 31))
        if target != packed.device and packed.device.type != "cpu":
            raise ArgumentTypeError(f"out: on {target}, expected {packed.device}")
        wanted = None
        if indices is None:
            n = check_range_argument(start, stop, n_rows) - start
        else:
            if start != 0 or stop is not None:
                raise ArgumentError("start, stop: not together with indices")
            wanted = check_indices_argument(indices)
            n = wanted.shape[0]
        if out is not None:
            sources = [*packed.parts.values(), *([] if indices is None else [indices])]
            check_out_argument(out, (n, *self.row_shape), self.dtype, target, sources)
        if wanted is not None and target.type == "cpu":
            wanted = wanted.cpu()
        if wanted is not None and wanted.device.type == "cpu":
            position = cpu.check_ids(wanted, n_rows)
            if position >= 0:
                raise_bad_index(int(wanted[position]), position, n_rows)
        result = out
        if result is None or not bits_in_order(result):
            result = torch.empty((n, *self.row_shape), dtype=self.dtype, device=target)
        data = rows_as_bytes(result, self.row_bytes)
        if n:
            kernels, layout = self._on(target)
            facts = packed.facts
            if "max_block_words" not in facts:  # put together by hand
                facts = _offsets(packed.parts["lengths"], layout.format.row_words)[1]
            if target != packed.device:
                decode_across(kernels, layout, storage, facts, wanted, start, data, via, sm_budget)
            else:
                ids = None if wanted is None else wanted.to(target)
                bad = kernels.decode_rows(storage, layout, ids, start, data, facts, sm_budget)
                if bad >= 0:
                    raise CorruptedDataError(f"packed: row {bad} is damaged; nothing was decoded")
        return result if out is None or out is result else out.copy_(result)

    def packed_bytes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the bytes that each row takes packed, its per-row metadata not counted.

        Parameters
        ----------
        rows : torch.Tensor
            ``[N, *row_shape]`` of the codec's dtype, on any device.

        Returns
        -------
        torch.Tensor
            int64 ``[N]`` on the same device; row_bytes for a row kept raw.
        """
        check_rows_argument(self, rows)
        kernels, layout = self._on(rows.device)
        lengths, _ = kernels.packed_words(rows_as_bytes(rows, self.row_bytes), layout)
        return torch.where(lengths == 0, self.row_bytes, 4 * unsigned_lengths(lengths))

    # Files and wires

    def adopt(self, n_rows: int, parts: Mapping[str, torch.Tensor]) -> PackedRows:
        """Check parts that came from outside and return them as packed rows.

        Parameters
        ----------
        n_rows : int
            Number of rows that they should hold.
        parts : mapping of str to torch.Tensor
            On the CPU, as `encode` names them; contents may be anything.

        Raises
        ------
        ArgumentTypeError
            When a part is not on the CPU, where rows are checked.
        CorruptedDataError
            When a part is missing, has another dtype or shape, or any row is damaged.
        """
        f = self.profile.format
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and part.device.type != "cpu":
                raise ArgumentTypeError(f"parts: {name} on {part.device}, expected cpu")
        try:
            self._storage(PackedRows(n_rows, dict(parts)))
        except (ArgumentError, ArgumentTypeError) as error:
            raise CorruptedDataError(str(error)) from None
        if n_rows and int(unsigned_lengths(parts["lengths"]).max()) >= f.row_words:
            raise CorruptedDataError("packed rows: a packed row is as long as a raw one")
        bases, facts = _offsets(parts["lengths"], f.row_words)
        n_words = parts["words"].shape[0] - PAD_WORDS
        if not torch.equal(bases, parts["bases"]) or facts["n_words"] != n_words:
            raise CorruptedDataError("packed rows: offsets, lengths and words do not fit together")
        packed = PackedRows(n_rows, dict(parts), facts)
        _, layout = self._on(torch.device("cpu"))
        bad = cpu.check_rows(self._storage(packed), layout)
        if bad >= 0:
            raise CorruptedDataError(f"packed rows: row {bad} is damaged")
        return packed

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

    def row_layout(self) -> RowLayout:
        """Return the tables that the kernels read, on the CPU."""
        return self._layouts[torch.device("cpu")]

    # Inside

    def _on(self, device: torch.device) -> tuple[Kernels, RowLayout]:
        """Return the kernels and the tables for a device."""
        kernels = kernels_for(device)
        layout = self._layouts.get(device)
        if layout is None:
            layout = self._layouts[torch.device("cpu")].to(device)
            self._layouts[device] = layout
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            # Callers cannot see the tables: tell the allocator itself which streams read them.
            stream = torch.cuda.current_stream(device)
            layout.tables.record_stream(stream)
            layout.starts.record_stream(stream)
        return kernels, layout

    def _expected_parts(
        self, n_rows: int | None
    ) -> dict[str, tuple[torch.dtype, tuple[int | None, ...]]]:
        """Dtypes and shapes of the parts of `n_rows` packed rows."""
        f = self.profile.format
        bases = None if n_rows is None else ceil_div(n_rows, BLOCK_ROWS) + 1
        expected: dict[str, tuple[torch.dtype, tuple[int | None, ...]]] = {
            "words": (torch.int32, (None,)),
            "bases": (torch.int64, (bases,)),
            "lengths": (f.length_dtype, (n_rows,)),
        }
        if f.clusters > 1:
            expected["row_clusters"] = (torch.uint8, (n_rows,))
        return expected

    def _storage(self, packed: PackedRows) -> RowStorage:
        check_packed_argument(packed, self._expected_parts(getattr(packed, "n_rows", None)))
        p = packed.parts
        if p["words"].shape[0] < PAD_WORDS:
            raise ArgumentError(
                f"packed: {p['words'].shape[0]} words, expected {PAD_WORDS} or more"
            )
        empty = torch.empty(0, dtype=torch.uint8, device=packed.device)
        return RowStorage(p["words"], p["bases"], p["lengths"], p.get("row_clusters", empty))


def _offsets(lengths: torch.Tensor, row_words: int) -> tuple[torch.Tensor, dict[str, int]]:
    """Return the bases of the blocks of rows, and the sizes that decode needs on the host.

    On a GPU this waits once.
    """
    words = words_of_rows(lengths, row_words)
    bases, by_block = bases_of_rows(words)
    totals = [0, 0, 0]
    if len(words):
        totals = torch.stack([bases[-1], words.max(), by_block.max()]).tolist()
    names = ("n_words", "max_row_words", "max_block_words")
    return bases, dict(zip(names, totals, strict=True))


def _check_integer(name: str, value: Any, accepted: range) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}")
    if value not in accepted:
        raise ArgumentError(f"{name}: {value}, accepted are {accepted[0]} to {accepted[-1]}")


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
