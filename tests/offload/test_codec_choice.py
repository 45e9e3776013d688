"""Codecs for weights: kept for tensors of one kind, near to what a plan of their own would save."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bitslab import InvariantCodec
from bitslab.engine.codecs import RowCodec
from bitslab.offload import codec_choice
from bitslab.offload.codec_choice import CodecChooser, ideal_share

SCALES = [0.02, 0.0203, 0.021, 0.024, 0.028, 0.04, 0.01, 0.3, 0.02, 0.03]


def normal(scale: float, dtype: torch.dtype, seed: int, n: int = 2048) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, 512, generator=generator) * scale).to(dtype)


def saved(codec: RowCodec, rows: torch.Tensor) -> float:
    """Return the share of the bytes of all rows that a codec saves."""
    packed = int(codec.packed_bytes(rows).sum()) + codec.row_metadata_bytes(rows.shape[0])
    return 1 - packed / rows.nbytes


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_is_kept_saves_nearly_what_a_plan_of_its_own_does(dtype, monkeypatch):
    fits: list[int] = []
    fit = InvariantCodec.fit.__func__  # type: ignore[attr-defined]

    def counted(cls: Any, /, sample: torch.Tensor, **options: Any) -> InvariantCodec:
        fits.append(len(sample))
        found: InvariantCodec = fit(cls, sample, **options)
        return found

    given = [normal(scale, dtype, n) for n, scale in enumerate(SCALES)]
    own = [saved(InvariantCodec.fit(rows), rows) for rows in given]
    chooser = CodecChooser(InvariantCodec)
    monkeypatch.setattr(InvariantCodec, "fit", classmethod(counted))
    for n, rows in enumerate(given):
        codec, expected = chooser.choose(rows)
        assert abs(saved(codec, rows) - expected) < 0.001
        assert saved(codec, rows) > own[n] - 0.003, SCALES[n]
    assert 1 <= len(fits) <= 3


def test_tensors_alike_share_one_codec():
    chooser = CodecChooser(InvariantCodec)
    first, _ = chooser.choose(normal(0.02, torch.bfloat16, 0))
    other, _ = chooser.choose(normal(0.3, torch.bfloat16, 1))
    assert other is not first and other.profile.format == first.profile.format  # type: ignore[attr-defined]
    for n in range(4):
        assert chooser.choose(normal(0.02, torch.bfloat16, n))[0] is first
        assert chooser.choose(normal(0.3, torch.bfloat16, n))[0] is other


def test_tensors_of_another_kind_are_planned_anew():
    chooser = CodecChooser(InvariantCodec)
    kinds = {
        "normal": normal(0.02, torch.float32, 0),
        "rounded": normal(0.02, torch.bfloat16, 1).float(),
        "sparse": normal(1, torch.float32, 2) * (normal(1, torch.float32, 3) > 2),
        "uniform": normal(0.02, torch.float32, 4).abs().clamp(0.5, 1),
    }
    for _ in range(2):
        for rows in kinds.values():
            codec, share = chooser.choose(rows)
            assert share > saved(InvariantCodec.fit(rows), rows) - 0.004


def test_a_choice_depends_on_the_tensors_and_their_order_alone():
    rows = [normal(scale, torch.bfloat16, n) for n, scale in enumerate(SCALES)]
    first, second = CodecChooser(InvariantCodec), CodecChooser(InvariantCodec)
    assert [first.choose(r)[0] for r in rows] == [second.choose(r)[0] for r in rows]


def test_few_codecs_are_remembered():
    chooser = CodecChooser(InvariantCodec)
    for n in range(8):
        chooser.choose(normal(math.pow(4.0, n) / 1000, torch.bfloat16, n, 256))
    assert [len(known) for known in chooser._known.values()] == [codec_choice.MOST_KEPT]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (torch.zeros(64, 64), 1.0),
        (torch.randint(256, (2048, 64), dtype=torch.uint8), 0.0),
        (torch.randint(16, (2048, 64), dtype=torch.uint8), 0.5),
        (torch.randint(256, (2048, 64)).to(torch.int32), 0.75),
        # Floats between 1 and 2: the exponent and the sign are always the same.
        (torch.rand(2048, 64) + 1, 9 / 32),
        (torch.complex(torch.rand(2048, 64) + 1, torch.rand(2048, 64) + 1), 9 / 32),
    ],
    ids=["zeros", "noise", "few", "small", "floats", "complex"],
)
def test_the_ideal_is_that_of_the_bytes_frequencies(rows, expected):
    # Sign and seven bits of the fraction share a byte once the word is rotated.
    assert ideal_share(rows) == pytest.approx(expected, abs=0.01)
