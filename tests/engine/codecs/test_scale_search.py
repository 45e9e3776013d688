"""The search for scales on a device, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitslab.engine.codecs.quantized.scale_search import BETWEEN, Curve, between, cheapest


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_errors_are_interpolated_by_their_logarithms_and_bits_as_they_are() -> None:
    scales, errors, bits = [0.1, 0.5, 3.0], [0.002, 0.03, 0.4], [6.0, 3.5, 1.25]
    curve = Curve(scales, doubles(*errors), doubles(*bits))
    at = np.linspace(0, 2, 2 * BETWEEN + 1)
    for found, known in ((curve.scales, scales), (curve.errors, errors)):
        expected = np.exp(np.interp(at, range(3), np.log(known)))
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(curve.bits.numpy(), np.interp(at, range(3), bits), rtol=1e-12)


def test_a_single_scale_and_an_error_of_zero_make_curves() -> None:
    curve = Curve([0.7], doubles(0.0), doubles(2.0))
    assert curve.scales.tolist() == pytest.approx([0.7]) and curve.bits.tolist() == [2.0]
    assert 0 < curve.errors.item() < 1e-20


def test_the_cheapest_pair_is_that_of_all_pairs() -> None:
    generator = np.random.default_rng(3)
    for target in (0.15, 0.25, 0.5):
        sides = []
        for scales in ([0.1, 0.4, 1.0, 3.0], [0.2, 2.0]):
            errors = np.sort(generator.uniform(0.001, 0.3, len(scales)))
            bits = np.sort(generator.uniform(1, 6, len(scales)))[::-1].copy()
            sides.append(Curve(scales, doubles(*errors), doubles(*bits)))
        k, v = sides
        best = min(
            (float(k.bits[i] + v.bits[j]), float(k.scales[i]), float(v.scales[j]))
            for i in range(len(k.scales))
            for j in range(len(v.scales))
            if np.hypot(k.errors[i].item(), v.errors[j].item()) <= target
        )
        assert cheapest(k, v, target).tolist() == list(best[1:])
    assert cheapest(k, v, 1e-6).tolist() == pytest.approx([0.1, 0.2])  # the finest


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ((0.04, 0.08, 0.16, 0.32), 1.0 * 2.0**0.25),  # between the second and the third
        ((0.11, 0.2, 0.3, 0.4), 0.5),  # none is fine: the finest
        ((0.01, 0.02, 0.03, 0.04), 4.0),  # all are
        ((0.04, 0.2, 0.09, 0.4), 2.0 * 2.0 ** (np.log(0.1 / 0.09) / np.log(0.4 / 0.09))),
    ],
)
def test_a_factor_between_those_around_the_goal(errors: tuple[float, ...], expected: float) -> None:
    goal = 0.08 * 2**0.25 if errors[1] == 0.08 else 0.1
    order = [2, 0, 3, 1]
    found = between(doubles(0.5, 1.0, 2.0, 4.0)[order], doubles(*errors)[order], goal)
    assert found.tolist() == pytest.approx([expected])
