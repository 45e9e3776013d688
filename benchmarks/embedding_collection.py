"""Steps of training of many small tables: a collection of them, and one nn.EmbeddingBag for each.

Microseconds of a step, fresh ids for each: lookup, backward and SGD, one id a bag and table, all
rows resident.

- ``nn.EmbeddingBag``: one for each table.
- ``TorchRec``: its EmbeddingBagCollection, which does the same.
- ``ours``: CompressedEmbeddingBagCollection, whose tables lie back to back.
- ``limit``: 1.3 times the step of TorchRec's.
- ``host``: time of the host alone, for as many steps as a GPU's queue takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from embedding_ids import Draw
from embedding_training import LEARNING_RATE, QUEUED_STEPS, RESIDENT_FACTOR, WARM_UP, measure_steps

Rows = list[dict[str, Any]]
N_TABLES, TABLE_ROWS = 26, 10_000  # as many tables as Criteo's logs have


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Measure, and compare the rows with TorchRec's after all steps."""
    try:
        import torchrec  # noqa: F401
    except (ImportError, OSError) as error:
        print(f"left out: collections: {error}", file=sys.stderr)
        return {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = [
        _line(row_bytes, bags, device, arguments)
        for row_bytes in arguments.row_bytes
        for bags in arguments.batches
    ]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    title = f"Steps of {N_TABLES} tables of {TABLE_ROWS} rows on {name}, SGD, microseconds"
    return {title: found}


def _line(
    row_bytes: int, bags: int, device: torch.device, arguments: argparse.Namespace
) -> dict[str, Any]:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    from bitslab.integrations.torchrec import CompressedEmbeddingBagCollection

    def configs() -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=TABLE_ROWS,
                embedding_dim=row_bytes // 4,
                feature_names=[f"f{i}"],
            )
            for i in range(N_TABLES)
        ]

    keys = [f"f{i}" for i in range(N_TABLES)]
    lengths = torch.ones(N_TABLES * bags, dtype=torch.int64, device=device)
    offsets = torch.arange(bags, device=device)
    draw = Draw(TABLE_ROWS, "zipf")
    torch.manual_seed(0)
    theirs = EmbeddingBagCollection(tables=configs(), device=device)
    weights = {name.split(".")[1]: t.cpu().clone() for name, t in theirs.state_dict().items()}
    plain = torch.nn.ModuleList(
        torch.nn.EmbeddingBag.from_pretrained(
            weights[f"t{i}"].clone().to(device), False, mode="sum"
        )
        for i in range(N_TABLES)
    )
    ours = CompressedEmbeddingBagCollection(
        configs(), device=device, weights=weights, cache_ratio=1.0, codec="raw"
    )

    def features(ids: torch.Tensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys, ids.view(-1), lengths=lengths)

    ways: dict[str, tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]] = {
        "nn.EmbeddingBag": (
            plain,
            lambda ids: torch.cat([bag(i, offsets) for bag, i in zip(plain, ids, strict=True)], 1),
        ),
        "TorchRec": (theirs, lambda ids: theirs(features(ids)).values()),
        "ours": (ours, lambda ids: ours(features(ids)).values()),
    }
    line: dict[str, Any] = {"row B": row_bytes, "bags": bags}
    hosts = {}
    for name, (module, look_up) in ways.items():
        optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)

        def step(
            ids: torch.Tensor,
            look_up: Callable[[torch.Tensor], torch.Tensor] = look_up,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> None:
            optimizer.zero_grad()
            loss: Any = look_up(ids).sum()
            loss.backward()
            optimizer.step()

        batches = list(_batches(draw, bags, device, arguments.repetitions))
        line[f"{name} us"], hosts[name] = measure_steps(step, batches)
        draw = Draw(TABLE_ROWS, "zipf")  # the same ids for the next one
    line["limit us"] = RESIDENT_FACTOR * line["TorchRec us"]
    line["ours / limit"] = line["ours us"] / line["limit us"]
    line["nn / ours"] = line["nn.EmbeddingBag us"] / line["ours us"]
    line |= {"TorchRec host us": hosts["TorchRec"], "host us": hosts["ours"]}
    trained = theirs.state_dict()
    for name, t in ours.state_dict().items():
        if not torch.allclose(t.cpu(), trained[name].cpu(), rtol=0, atol=1e-4):
            raise SystemExit(f"{name}: rows differ from TorchRec's")
    return line


def _batches(
    draw: Draw, bags: int, device: torch.device, repetitions: int
) -> Iterator[torch.Tensor]:
    """Yield ids ``[N_TABLES, bags]`` for each step."""
    for _ in range(WARM_UP + QUEUED_STEPS + repetitions):
        yield draw.ids(N_TABLES * bags).view(N_TABLES, bags).to(device)
