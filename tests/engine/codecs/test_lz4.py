"""What is lz4's own: blocks that any reader of LZ4 decodes, and its package."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import lz4.block
import pytest
import torch

import bitslab
from bitslab.engine.codecs import Lz4Codec
from bitslab.engine.codecs.lz4 import CHUNK_BYTES
from bitslab.engine.kernels.cuda import nvcomp
from tests.helpers import bits_of, same_bits


def test_blocks_stand_alone_where_the_sizes_say():
    t = torch.arange(40_000, dtype=torch.int32).div(50, rounding_mode="floor")
    t[CHUNK_BYTES // 4 : CHUNK_BYTES // 2] = torch.randint(1 << 31, (CHUNK_BYTES // 4,))
    data = Lz4Codec().encode(t).trimmed().data.numpy()
    raw = bits_of(t).numpy().tobytes()
    sizes = data[32:44].view("<u4").tolist()
    assert sizes[1] == CHUNK_BYTES and max(sizes[0], sizes[2]) < CHUNK_BYTES // 4
    at = 48
    for i, size in enumerate(sizes):
        part = raw[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]
        block = data[at : at + size].tobytes()
        assert (block if i == 1 else lz4.block.decompress(block, len(part))) == part
        padding = 0 if i == 2 else -size % 16
        assert not data[at + size : at + size + padding].any()
        at += size + padding
    assert at == len(data)


def test_blocks_of_others_are_read():
    t = torch.zeros(50_000)
    blob = Lz4Codec().encode(t)
    parts = [
        bits_of(t).numpy().tobytes()[i : i + CHUNK_BYTES] for i in range(0, t.nbytes, CHUNK_BYTES)
    ]
    at = 32 + 16
    for i, part in enumerate(parts):
        block = lz4.block.compress(part, mode="high_compression", compression=9, store_size=False)
        blob.data[32 + 4 * i : 36 + 4 * i] = bits_of(torch.tensor(len(block), dtype=torch.int32))
        at += -at % 16
        blob.data[at : at + len(block)] = torch.frombuffer(bytearray(block), dtype=torch.uint8)
        at += len(block)
    blob.data[:8] = bits_of(torch.tensor(at))
    assert same_bits(Lz4Codec().decode(blob), t)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    codec, t = Lz4Codec(), torch.zeros(10)
    blob = codec.encode(t)
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    monkeypatch.setitem(sys.modules, "lz4", None)
    for call in (lambda: codec.encode(t), lambda: codec.decode(blob)):
        with pytest.raises(bitslab.MissingExtraError, match=r'pip install "bitslab\[lz4\]"'):
            call()


def test_without_nvcomp_the_error_of_a_gpu_names_its_extra(monkeypatch):
    monkeypatch.setattr(nvcomp, "is_installed", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(bitslab.MissingExtraError, match=r'pip install "bitslab\[lz4-cuda12\]"'):
        nvcomp.load_library()


def test_a_library_that_is_too_old_is_refused(monkeypatch):
    library: dict[str, Any] = {"nvcompGetProperties": lambda properties: 0}  # version 0
    module = SimpleNamespace(load_library=lambda: library)
    monkeypatch.setattr(nvcomp, "is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "nvidia.libnvcomp.load", module)
    monkeypatch.setattr("importlib.import_module", sys.modules.__getitem__)
    with pytest.raises(bitslab.BitslabError, match="version as 0, accepted are 5100"):
        nvcomp.load_library()
    module.load_library = lambda: None
    with pytest.raises(bitslab.BitslabError, match="does not load"):
        nvcomp.load_library()
