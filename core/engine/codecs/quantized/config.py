"""Plans of tiles as JSON-able values, and what a plan must be for kernels to read its tables."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ....dtypes import dtype_from_name, dtype_name
from ....errors import ArgumentError, CorruptedDataError
from ...kernels.tile_format import (
    MAX_CLASSES,
    MAX_CODE,
    MAX_RADIUS,
    MAX_SYMBOLS,
    ZERO_SYMBOL,
    Granularity,
    TileFormat,
)
from ..huffman import check_lengths
from .plan import TilePlan, symbols_of

#: Heads of a plan, and rows of one head that follow each other, at the most.
MAX_HEADS = 1 << 16


def plan_problem(plan: TilePlan) -> str | None:
    """Return what is wrong with a plan whose format is sound, or None.

    Kernels index by what a plan holds; none may do so with one that this finds wrong.
    """
    fmt, heads, classes = plan.format, plan.heads, len(plan.radius)
    for name in ("heads", "rows_per_head"):
        count = getattr(plan, name)
        if type(count) is not int or not 1 <= count <= MAX_HEADS:
            return f"{name} is {count!r:.60}, expected 1 to {MAX_HEADS}"
    if type(plan.scale) is not float or not 0 < plan.scale < float("inf"):
        return f"scale is {plan.scale!r:.60}, expected a number above 0"
    if not 1 <= classes <= MAX_CLASSES:
        return f"{classes} classes, expected 1 to {MAX_CLASSES}"
    by_channel = (heads, fmt.dim) if fmt.granularity is Granularity.CHANNEL else (0, 0)
    shapes: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
        "order": ((heads, fmt.dim), np.uint8),
        "block_class": ((heads, fmt.blocks), np.uint8),
        "radius": ((classes,), np.uint8),
        "lengths": ((classes, MAX_SYMBOLS), np.uint8),
        "steps": (by_channel, np.float32),
        "centers": (by_channel, np.float32),
    }
    for name, (shape, dtype) in shapes.items():
        array = getattr(plan, name)
        if array.shape != shape or array.dtype != dtype:
            return (
                f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} "
                f"{list(shape)}"
            )
    if (np.sort(plan.order, axis=1) != np.arange(fmt.dim)).any():
        return "order is no permutation of the channels of each head"
    if (plan.block_class >= classes).any():
        return f"block_class has class {plan.block_class.max()} of {classes}"
    if not (np.isfinite(plan.steps) & (plan.steps > 0)).all():
        return "steps has some that are not positive and finite"
    if not np.isfinite(plan.centers).all():
        return "centers has some that are not finite"
    if fmt.lossless and plan.radius.any():
        return f"radius is {plan.radius.tolist()}, lossless tiles have single codes alone"
    for c in range(classes):
        problem = _code_problem(int(plan.radius[c]), plan.lengths[c], fmt)
        if problem:
            return f"class {c}: {problem}"
    return None


def _code_problem(radius: int, lengths: npt.NDArray[np.uint8], fmt: TileFormat) -> str | None:
    """Return what is wrong with the code of a class, or None."""
    if radius > MAX_RADIUS:
        return f"radius {radius}, expected 0 to {MAX_RADIUS}"
    first = 0 if radius else ZERO_SYMBOL - MAX_CODE
    known = np.zeros(MAX_SYMBOLS, bool)
    known[first : symbols_of(radius)] = True
    if lengths[~known].any():
        return f"code lengths of symbols that radius {radius} does not have"
    if not lengths[radius * (2 * radius + 2) if radius else fmt.escape_symbol]:
        return "code lengths: zeros have no code"
    try:
        check_lengths(lengths, fmt.code_bits)
    except CorruptedDataError as error:
        return str(error)
    return None


def plan_to_config(plan: TilePlan) -> dict[str, Any]:
    """Return a plan as JSON-able values; arrays as base64 of little-endian bytes."""
    fmt = plan.format
    lengths = [
        _base64(of_class[: symbols_of(int(radius))])
        for radius, of_class in zip(plan.radius, plan.lengths, strict=True)
    ]
    config: dict[str, Any] = {
        "tokens": fmt.tokens,
        "dim": fmt.dim,
        "dtype": dtype_name(fmt.dtype),
        "granularity": fmt.granularity.name.lower(),
        "token_pairs": fmt.token_pairs,
        "code_bits": fmt.code_bits,
        "heads": plan.heads,
        "rows_per_head": plan.rows_per_head,
        "scale": plan.scale,
        "order": _base64(plan.order),
        "block_class": _base64(plan.block_class),
        "radius": plan.radius.tolist(),
        "lengths": lengths,
    }
    if fmt.granularity is Granularity.CHANNEL:
        config |= {"steps": _base64(plan.steps), "centers": _base64(plan.centers)}
    return config


def plan_from_config(config: Mapping[str, Any]) -> TilePlan:
    """Build and check the plan that `plan_to_config` described.

    Raises
    ------
    CorruptedDataError
        When an entry is missing, of another type, out of range, or does not fit the others.
    """
    fmt = _format(config)
    heads = config.get("heads")
    if type(heads) is not int or not 1 <= heads <= MAX_HEADS:
        raise CorruptedDataError(f"tiles: heads is {heads!r:.60}, expected 1 to {MAX_HEADS}")
    radius, lengths = config.get("radius"), config.get("lengths")
    if not isinstance(radius, list) or not isinstance(lengths, list):
        raise CorruptedDataError("tiles: radius and lengths are no lists")
    if not 1 <= len(radius) == len(lengths) <= MAX_CLASSES or not all(
        type(r) is int and 0 <= r <= MAX_RADIUS for r in radius
    ):
        raise CorruptedDataError(
            f"tiles: radius is {radius!r:.60} and there are {len(lengths)} lists of lengths, "
            f"expected 1 to {MAX_CLASSES} of 0 to {MAX_RADIUS}"
        )
    codes = np.zeros((len(radius), MAX_SYMBOLS), np.uint8)
    for c, reach in enumerate(radius):
        symbols = symbols_of(reach)
        codes[c, :symbols] = _array(lengths[c], f"lengths of class {c}", np.uint8, (symbols,))
    steps: dict[str, npt.NDArray[np.float32]] = {}
    if fmt.granularity is Granularity.CHANNEL:
        for name in ("steps", "centers"):
            steps[name] = _array(config.get(name), name, np.float32, (heads, fmt.dim))
    plan = TilePlan(
        format=fmt,
        heads=heads,
        rows_per_head=config.get("rows_per_head", 0),
        scale=config.get("scale", 0.0),
        order=_array(config.get("order"), "order", np.uint8, (heads, fmt.dim)),
        block_class=_array(config.get("block_class"), "block_class", np.uint8, (heads, fmt.blocks)),
        radius=np.array(radius, np.uint8),
        lengths=codes,
        **steps,
    )
    problem = plan_problem(plan)
    if problem:
        raise CorruptedDataError(f"tiles: {problem}")
    return plan


def _format(config: Mapping[str, Any]) -> TileFormat:
    """Return the format of a configuration."""
    names = {granularity.name.lower(): granularity for granularity in Granularity}
    granularity = config.get("granularity")
    if not isinstance(granularity, str) or granularity not in names:
        raise CorruptedDataError(
            f"tiles: granularity is {granularity!r:.60}, expected one of {', '.join(names)}"
        )
    token_pairs = config.get("token_pairs")
    if not isinstance(token_pairs, bool):
        raise CorruptedDataError(
            f"tiles: token_pairs is {token_pairs!r:.60}, expected true or false"
        )
    dtype = dtype_from_name(config.get("dtype", ""))
    sizes: dict[str, Any] = {name: config.get(name) for name in ("tokens", "dim", "code_bits")}
    try:
        return TileFormat(
            dtype=dtype, granularity=names[granularity], token_pairs=token_pairs, **sizes
        )
    except ArgumentError as error:
        raise CorruptedDataError(f"tiles: {error}") from None


def _base64(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _array(
    text: object, name: str, dtype: type[np.generic], shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Return the array of a configuration's text."""
    try:
        data = base64.b64decode(text if isinstance(text, str) else "?", validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorruptedDataError(f"tiles: {name} is not base64") from error
    expected = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if len(data) != expected:
        raise CorruptedDataError(f"tiles: {name} has {len(data)} bytes, expected {expected}")
    little = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)
    return little.astype(dtype)
