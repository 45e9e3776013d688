"""Measure the time model of codecs of whole tensors, beside regressions of scikit-learn.

python benchmarks/swap_model.py                       # on a GPU where there is one, else on the CPU
python benchmarks/swap_model.py --codecs zvc --budget 20

Tensors are drawn as `fit_time_model` draws them, every second one held out. All models learn from
the same other half: sizes, packed shares and seconds. Errors are of the held-out half: the relative
absolute error of CSWAP+ (section 6.3), in brackets the mean relative error of a tensor. Then the
host's time of a prediction, of a range of P and of deciding for a step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.linear_model import BayesianRidge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVR
from sklearn.tree import DecisionTreeRegressor

from bitslab.engine.advisor import (
    SiteRecord,
    SwapLink,
    TimeModel,
    TimeSample,
    decide,
    fit_codec_times,
    lossy_range,
    measure_codec,
    relative_absolute_error,
)
from bitslab.engine.codecs.registry import get_codec

PEERS: dict[str, Callable[[], Any]] = {
    "Bayesian ridge": BayesianRidge,
    "SVM": SVR,
    "decision tree": lambda: DecisionTreeRegressor(random_state=0),
}
SITES = 50


def errors(samples: Sequence[TimeSample]) -> dict[str, list[tuple[float, float]]]:
    """Return by model the errors of encoding and decoding, relative absolute and mean relative."""
    table = np.array(samples)
    learnt, held_out = table[::2], table[1::2]
    times = fit_codec_times([TimeSample(*row) for row in learnt])
    guesses = {"bitslab": np.array([times.predict(*row[:2]) for row in held_out])}
    for name, make in PEERS.items():
        columns = []
        for column in (2, 3):
            peer = TransformedTargetRegressor(
                make_pipeline(StandardScaler(), make()), transformer=StandardScaler()
            )
            peer.fit(learnt[:, :2], learnt[:, column])
            columns.append(peer.predict(held_out[:, :2]))
        guesses[name] = np.stack(columns, 1)
    return {
        name: [
            (
                relative_absolute_error(guess[:, k], held_out[:, 2 + k]),
                float(np.abs(guess[:, k] / held_out[:, 2 + k] - 1).mean()),
            )
            for k in (0, 1)
        ]
        for name, guess in guesses.items()
    }


def best_seconds(work: Callable[[], object], calls: int) -> float:
    """Return the least seconds a call of seven runs."""
    runs = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        runs.append((time.perf_counter() - begin) / calls)
    return min(runs)


def host_times(model: TimeModel, codec_name: str) -> None:
    """Print what the host takes to predict and to decide."""
    link = SwapLink(50e9, 50e9, 8e-6)
    random = np.random.default_rng(0)
    sites = [
        SiteRecord(
            site=f"{i}",
            shape=(1,),
            dtype=torch.float32,
            nbytes=int(random.uniform(20e6, 500e6)),
            hidden_forward_s=random.uniform(0, 10e-3),
            hidden_backward_s=random.uniform(0, 20e-3),
            ratio={codec_name: random.uniform(0.2, 0.9)},
        )
        for i in range(SITES)
    ]
    rows = [
        ("a prediction", best_seconds(lambda: model.predict(codec_name, 1e8, 0.5), 1000), 20e-6),
        (
            f"a range of P, {SITES} sites",
            best_seconds(lambda: lossy_range(sites, model, link, codec_name), 1),
            50e-3,
        ),
        (f"deciding, {SITES} sites", best_seconds(lambda: decide(sites, model, link), 1), None),
    ]
    for what, seconds, asked in rows:
        wanted = "" if asked is None else f", asked {asked * 1e6:,.0f}"
        print(f"{what}: {seconds * 1e6:,.1f} us{wanted}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--codecs", nargs="+", default=["zvc"], help="names in the registry")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--samples", type=int, default=120, help="tensors; half are held out")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds a codec")
    given = parser.parse_args()
    known = {}
    for name in given.codecs:
        begin = time.perf_counter()
        codec: Any = get_codec(name)
        samples, sm_budget = measure_codec(
            given.device,
            [codec],
            getattr(torch, given.dtype),
            n_samples=given.samples,
            budget_s=given.budget,
        )
        known[name, getattr(torch, given.dtype).itemsize] = fit_codec_times(samples)
        sizes = [sample.nbytes for sample in samples]
        print(
            f"{name} {given.dtype} on {given.device}: {len(samples)} tensors of "
            f"{min(sizes) / 1e6:.3g} to {max(sizes) / 1e6:.4g} MB in "
            f"{time.perf_counter() - begin:.1f} s, multiprocessors {sm_budget or 'all'}"
        )
        for model, ((encode, encode_mean), (decode, decode_mean)) in errors(samples).items():
            print(
                f"  {model:15} encode {encode:6.1%} ({encode_mean:6.1%})  "
                f"decode {decode:6.1%} ({decode_mean:6.1%})"
            )
    host_times(TimeModel(known), given.codecs[0])


if __name__ == "__main__":
    main()
