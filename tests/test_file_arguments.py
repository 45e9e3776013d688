"""Arguments of saving and loading that are no path, no mapping: named, and nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bitslab

ANY: Any = bitslab  # whose arguments are of other types than is said


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ct, path: ANY.load(None), "path: expected str or os.PathLike, got None"),
        (lambda ct, path: ANY.load_file(3), "path: expected str or os.PathLike, got 3"),
        (lambda ct, path: ct.save(None), "path: expected str or os.PathLike, got None"),
        (lambda ct, path: ANY.save_file({"a": ct}, 3), "path: expected str or os.PathLike"),
        (lambda ct, path: ANY.save_file([ct], path), "tensors: expected .* by name, got list"),
        (lambda ct, path: ANY.save_file({"a": ct}, path, [1]), "metadata: .*, got list"),
    ],
    ids=["load", "load-file", "save", "save-file", "no-names", "metadata"],
)
def test_arguments_of_files_are_named(call, message, tmp_path):
    path = tmp_path / "some.safetensors"
    with pytest.raises(bitslab.ArgumentTypeError, match=message):
        call(bitslab.compress(torch.ones(3)), path)
    assert not list(tmp_path.iterdir())
