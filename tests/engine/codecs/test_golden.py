"""Bytes that were written once are decoded for ever, and still written."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import bitslab
from bitslab.engine.codecs import TileCodec, row_codec_class
from tests.engine.codecs import model, tile_model
from tests.golden import make_golden
from tests.helpers import bits_of, same_bits

NAMES = make_golden.names()


def content_of(name: str) -> Any:
    path = make_golden.FOLDER / f"{name}.json"
    assert path.is_file(), f"{path.name} is missing: take it back from the history of the project"
    return json.loads(path.read_text())


def decoded_of(name: str) -> torch.Tensor:
    """Return what is decoded: the rows, but for a lossy codec."""
    content = content_of(name)
    return make_golden.tensor_from_json(content.get("decoded", content["rows"]))


def read(name: str) -> tuple[bitslab.RowCodec, torch.Tensor, dict[str, torch.Tensor], Any]:
    content = content_of(name)
    codec = row_codec_class(content["codec"]).from_config(content["config"])
    parts = {key: make_golden.tensor_from_json(part) for key, part in content["parts"].items()}
    return codec, make_golden.tensor_from_json(content["rows"]), parts, content["config"]


def test_every_golden_file_is_read() -> None:
    assert sorted(path.stem for path in make_golden.FOLDER.glob("*.json")) == sorted(NAMES)


def test_every_codec_has_golden_files() -> None:
    codecs = {read(name)[0].name for name in NAMES}
    shipped = {
        name
        for name in bitslab.codec_names()
        if bitslab.get_codec(name).__module__.startswith("bitslab.")
        and issubclass(bitslab.get_codec(name), bitslab.RowCodec)
    }
    assert codecs == shipped >= {"ibp", "raw", "tiles"}


def test_every_option_has_golden_files() -> None:
    formats = list(make_golden.formats())
    for switch in ("grouped", "uniform", "clusters"):
        for width in (1, 2, 4, 8):
            chosen = {getattr(f, switch) for f in formats if f.chunk_bytes == width}
            assert len(chosen) == 2, (switch, width)
        for code_bits in (1, 2, 3):
            chosen = {getattr(f, switch) for f in formats if f.code_bits == code_bits}
            assert len(chosen) == 2, (switch, code_bits)
    assert len({(f.grouped, f.uniform, f.clusters) for f in formats}) == 8


@pytest.mark.parametrize("name", NAMES)
def test_golden_rows_are_decoded(name: str) -> None:
    codec, _, parts, _ = read(name)
    rows = decoded_of(name)
    packed = codec.adopt(len(rows), parts)
    assert same_bits(codec.decode(packed), rows)
    ids = torch.tensor([len(rows) - 1, 0, -1])
    assert same_bits(codec.decode(packed, ids), rows[ids])


@pytest.mark.parametrize("name", NAMES)
def test_golden_rows_are_encoded_to_the_same_bytes(name: str) -> None:
    codec, rows, parts, config = read(name)
    packed = codec.encode(rows)
    assert packed.parts.keys() == parts.keys()
    for key, part in parts.items():
        assert same_bits(packed.parts[key], part), key
    assert codec.to_config() == config


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("ibp1")])
def test_golden_rows_are_as_the_format_says(name: str) -> None:
    codec, rows, parts, config = read(name)
    assert b"".join(model.read_rows(config, parts)) == bits_of(rows).numpy().tobytes()
    lengths = model.unsigned(parts["lengths"])
    assert (lengths > 0).tolist() == [True, True, False], "the last row is there to remain raw"
    if isinstance(codec, bitslab.InvariantCodec) and codec.clusters > 1:
        assert parts["row_clusters"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("name", make_golden.TILES)
def test_golden_tiles_are_as_the_format_says(name: str) -> None:
    codec, rows, parts, config = read(name)
    assert isinstance(codec, TileCodec)
    reader, decoded = tile_model.Model(config), decoded_of(name)
    lengths = model.unsigned(parts["lengths"]).tolist()
    assert [length > 0 for length in lengths] == [True, True, True, False], "the last one is raw"
    words = model.unsigned(parts["words"]).tolist()
    at = 0
    for r, length in enumerate(lengths[:-1]):
        tile = words[at : at + length]
        assert (tile[0] >> 16 > 0) >= (r == 2), "the third one has exceptions"
        assert reader.encode(rows[r], r) == tile
        assert (reader.decode(tile, r) == reader.raw(decoded[r])).all()
        at += length
    assert same_bits(decoded[-1], rows[-1])


def test_golden_tiles_have_every_option() -> None:
    configs = [read(name)[3] for name in make_golden.TILES]
    assert len({c["granularity"] for c in configs}) == 6
    for key, n in (("dtype", 3), ("token_pairs", 2)):
        assert len({c[key] for c in configs}) == n
    classes = {radius > 0 for c in configs for radius in c["radius"]}
    assert classes == {False, True}
    assert {c["heads"] for c in configs} == {1, 2}
