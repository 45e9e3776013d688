"""The time model of codecs of whole tensors, beside regressions of scikit-learn.

Tensors are drawn as `fit_time_model` draws them, every second one held out. All models learn from
the same other half: sizes, packed shares and seconds. Errors are of the held-out half: the relative
absolute error of CSWAP+ (section 6.3), and the mean relative error of a tensor. Then the host's
time of a prediction, of a range of P and of deciding for a step.
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
    SwapLimits,
    SwapLink,
    TimeModel,
    TimeSample,
    decide,
    fit_codec_times,
    lossy_range,
    measure_codec,
    relative_absolute_error,
)
from bitslab.engine.codecs import blob_codec_class

PEERS: dict[str, Callable[[], Any]] = {
    "Bayesian ridge": BayesianRidge,
    "SVM": SVR,
    "decision tree": lambda: DecisionTreeRegressor(random_state=0),
}
SITES = 50

Rows = list[dict[str, Any]]
Report = Callable[[str], None]


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


def host_times(model: TimeModel, codec_name: str) -> Rows:
    """Return what the host takes to predict and to decide."""
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
    limits = SwapLimits(1 << 30, 3)
    made = decide(sites, model, link, limits=limits)
    asked: list[tuple[str, float, float | None]] = [
        ("a prediction", best_seconds(lambda: model.predict(codec_name, 1e8, 0.5), 1000), 20e-6),
        (
            f"a range of P, {SITES} sites",
            best_seconds(lambda: lossy_range(sites, model, link, codec_name), 1),
            50e-3,
        ),
        (
            f"deciding, {SITES} sites",
            best_seconds(lambda: decide(sites, model, link, limits=limits), 1),
            None,
        ),
        (
            f"deciding again, {SITES} sites",
            best_seconds(lambda: decide(sites, model, link, limits=limits, previous=made), 1),
            None,
        ),
    ]
    return [
        {"what": what, "us": seconds * 1e6, "asked": "" if most is None else most * 1e6}
        for what, seconds, most in asked
    ]


def model(arguments: argparse.Namespace, report: Report) -> dict[str, Rows]:
    """Return errors of the time model and its peers, and what deciding takes."""
    known = {}
    tables: dict[str, Rows] = {}
    dtype = getattr(torch, arguments.dtype)
    for name in arguments.model_codecs:
        begin = time.perf_counter()
        report(f"{name}: measuring {arguments.samples} tensors, {arguments.budget:g} s at most")
        samples, sm_budget = measure_codec(
            arguments.device,
            [blob_codec_class(name)],
            dtype,
            n_samples=arguments.samples,
            budget_s=arguments.budget,
        )
        known[name, dtype.itemsize] = fit_codec_times(samples)
        sizes = [sample.nbytes for sample in samples]
        title = (
            f"time model of {name}, {arguments.dtype}, {arguments.device}: {len(samples)} tensors "
            f"of {min(sizes) / 1e6:.3g} to {max(sizes) / 1e6:.4g} MB in "
            f"{time.perf_counter() - begin:.1f} s, multiprocessors {sm_budget or 'all'}: errors of "
            "the held-out half in %; asked on a GPU: 5, and below the peers"
        )
        tables[title] = [
            {
                "model": peer,
                "encode": 100 * encode,
                "decode": 100 * decode,
                "encode, mean of tensors": 100 * encode_mean,
                "decode, mean of tensors": 100 * decode_mean,
            }
            for peer, ((encode, encode_mean), (decode, decode_mean)) in errors(samples).items()
        ]
    tables["time of the host, us"] = host_times(TimeModel(known), arguments.model_codecs[0])
    return tables


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    add = parser.add_argument_group("model").add_argument
    add("--model-codecs", nargs="+", default=["zvc"], metavar="CODEC", help="default: zvc")
    add("--samples", type=int, default=120, help="tensors; half are held out (default: 120)")
    add("--budget", type=float, default=30.0, help="seconds a codec (default: 30)")
