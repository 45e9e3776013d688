"""Every row codec keeps the contract."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

import bitslab
import bitslab.engine.codecs
from bitslab.engine.codecs import TileCodec
from tests.engine.codecs.contract import Options, RangeContract, RowCodecContract, takes_range
from tests.engine.codecs.lossy_contract import LossyRowCodecContract
from tests.helpers import same_bits


class TestInvariantCodec(RangeContract, RowCodecContract):
    codec_class: ClassVar[type[bitslab.RowCodec]] = bitslab.InvariantCodec
    plans: ClassVar[dict[str, Options]] = {
        "auto": {},
        "published": {"code_bits": 1, "grouped": False, "uniform": False},
        "grouped-uniform-k3": {"code_bits": 3, "grouped": True, "uniform": True},
        "bytes-at-one-half": {"chunk_bytes": 1, "code_bits": 2, "threshold": 0.5},
        "clusters": {"clusters": 3, "code_bits": 1, "grouped": True},
    }

    @staticmethod
    def metadata_bytes(codec: Any, n_rows: int) -> int:
        return int(codec.row_metadata_bytes(n_rows))


class TestRawCodec(RangeContract, RowCodecContract):
    codec_class: ClassVar[type[bitslab.RowCodec]] = bitslab.RawCodec
    plans: ClassVar[dict[str, Options]] = {"no-options": {}}

    @staticmethod
    def metadata_bytes(codec: Any, n_rows: int) -> int:
        return 0


class TestTileCodec(LossyRowCodecContract):
    codec_class: ClassVar[type[bitslab.RowCodec]] = TileCodec
    plans: ClassVar[dict[str, Options]] = {
        "channel": {"granularity": "channel", "scale": 0.7, "heads": 2, "rows_per_head": 3},
        "token-level": {"granularity": "token_level", "token_pairs": True, "heads": 3},
        "block-range": {"granularity": "block_range", "scale": 0.05},
        "channel-range": {"granularity": "channel_range", "scale": 0.1, "coder": "fixed"},
        "token-range": {"granularity": "token_range", "scale": 0.2, "code_bits": 8},
    }
    dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    row_shape: ClassVar[tuple[int, ...]] = (32, 48)

    @staticmethod
    def metadata_bytes(codec: Any, n_rows: int) -> int:
        return int(codec.row_metadata_bytes(n_rows))


class TestLosslessTiles(LossyRowCodecContract):
    """Of the same class, but with bounds of 0."""

    codec_class: ClassVar[type[bitslab.RowCodec]] = TileCodec
    plans: ClassVar[dict[str, Options]] = {
        "channels": {"granularity": "lossless", "heads": 2, "rows_per_head": 3},
        "tokens": {"granularity": "lossless", "token_pairs": True, "code_bits": 8},
    }
    dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    row_shape: ClassVar[tuple[int, ...]] = (32, 48)

    @staticmethod
    def metadata_bytes(codec: Any, n_rows: int) -> int:
        return int(codec.row_metadata_bytes(n_rows))

    def test_usual_rows_are_not_kept_as_they_are(
        self, dtype: torch.dtype, options: Options
    ) -> None:
        rows = self.rows(dtype)
        codec = self.fit(rows, options)
        assert int(codec.packed_bytes(rows).max()) < codec.row_bytes
        assert same_bits(codec.decode(codec.encode(rows)), rows)
        assert not codec.bounds(rows).any()


CONTRACTS: dict[type[bitslab.RowCodec], type[RowCodecContract]] = {
    contract.codec_class: contract for contract in (TestInvariantCodec, TestRawCodec)
}
LOSSY_CONTRACTS: dict[type[bitslab.RowCodec], type[LossyRowCodecContract]] = {
    TileCodec: TestTileCodec
}


def shipped_classes() -> list[type[bitslab.RowCodec]]:
    """All concrete codecs of the package, whether or not anything imports their module."""
    for module in pkgutil.walk_packages(bitslab.engine.codecs.__path__, "bitslab.engine.codecs."):
        importlib.import_module(module.name)

    def below(cls: type[bitslab.RowCodec]) -> Iterator[type[bitslab.RowCodec]]:
        for subclass in cls.__subclasses__():
            yield subclass
            yield from below(subclass)

    base: Any = bitslab.RowCodec  # abstract, which mypy does not let through
    ours = {c for c in below(base) if c.__module__.startswith("bitslab.")}
    return sorted((c for c in ours if not inspect.isabstract(c)), key=lambda c: c.__name__)


def test_shipped_codecs_are_found() -> None:
    assert {bitslab.InvariantCodec, bitslab.RawCodec, TileCodec} <= set(shipped_classes())


@pytest.mark.parametrize("cls", shipped_classes(), ids=lambda c: c.__name__)
def test_shipped_codec_is_registered_and_tested(cls: type[bitslab.RowCodec]) -> None:
    assert cls.name in bitslab.codec_names()
    assert bitslab.get_codec(cls.name) is cls
    contracts: Any = CONTRACTS if cls.error_bound is None else LOSSY_CONTRACTS
    assert cls in contracts, f"{cls.__name__} needs a class in this file"


def test_registered_codecs_of_the_package_are_shipped_classes() -> None:
    registered = [bitslab.get_codec(name) for name in bitslab.codec_names()]
    ours = {
        cls
        for cls in registered
        if cls.__module__.startswith("bitslab.") and issubclass(cls, bitslab.RowCodec)
    }
    assert ours == set(shipped_classes())


@pytest.mark.parametrize("cls", CONTRACTS, ids=lambda c: c.__name__)
def test_codec_that_takes_a_range_is_tested_with_ranges(cls: type[bitslab.RowCodec]) -> None:
    assert takes_range(cls) == issubclass(CONTRACTS[cls], RangeContract)


def test_names_are_unique() -> None:
    names = [cls.name for cls in shipped_classes()]
    assert len(names) == len(set(names))
