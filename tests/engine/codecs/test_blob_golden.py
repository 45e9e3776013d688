"""Blobs that were written once are decoded for ever, and still written."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bitslab.engine.codecs import Blob, BlobCodec, blob_codec_class
from tests.engine.codecs.test_blob_contract import shipped_classes
from tests.golden import make_blobs
from tests.helpers import same_bits


def content_of(name: str) -> Any:
    path = make_blobs.FOLDER / f"{name}.json"
    assert path.is_file(), f"{path.name} is missing: take it back from the history of the project"
    return json.loads(path.read_text())


def read(name: str) -> tuple[BlobCodec, torch.Tensor, Blob]:
    content = content_of(name)
    codec = blob_codec_class(content["codec"]).from_config(content["config"])
    t = make_blobs.tensor_from_json(content["tensor"])
    return codec, t, Blob(make_blobs.tensor_from_json(content["data"]), t.shape, t.dtype)


def test_every_golden_file_is_read() -> None:
    assert {path.stem for path in make_blobs.FOLDER.glob("*.json")} == set(make_blobs.CASES)


def test_every_codec_has_golden_files() -> None:
    named = {content_of(name)["codec"] for name in make_blobs.CASES}
    assert named >= {cls.name for cls in shipped_classes()}


@pytest.mark.parametrize("name", make_blobs.CASES)
def test_golden_blobs_are_decoded_and_encoded_to_the_same_bytes(name: str) -> None:
    codec, t, blob = read(name)
    decoded = codec.decode(blob)
    content = content_of(name)
    # What a lossy codec decodes has been written down.
    expected = t if codec.error_bound is None else make_blobs.tensor_from_json(content["decoded"])
    assert same_bits(decoded, expected)
    if codec.name != "lz4":  # another version of the library may find shorter blocks
        assert torch.equal(codec.encode(t).trimmed().data, blob.data)
    assert codec.to_config() == content["config"]
