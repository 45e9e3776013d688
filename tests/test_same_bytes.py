"""Files are reproducible: what is saved twice has the same bytes, in every process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bitslab
from bitslab import cli
from bitslab.embedding.checkpoint import save_state
from bitslab.integrations.embedding import CachedEmbedding
from bitslab.offload import WeightPacker
from bitslab.report import files
from tests.helpers import packable

METADATA = {str(i): "x" * i for i in range(20)}
TENSORS = {
    f"{dtype}": packable(dtype, (60, 32))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
}


def save_tensors(path: Path) -> None:
    cts = {name: bitslab.compress(t) for name, t in TENSORS.items()}
    bitslab.save_file(cts, path, METADATA)


def save_clusters(path: Path) -> None:
    t = torch.cat([TENSORS["torch.float32"] * 1e9, TENSORS["torch.float32"]])
    bitslab.compress(t, "ibp", clusters=8).save(path)


def save_table(path: Path) -> None:
    bitslab.CompressedTable.from_tensor(TENSORS["torch.float32"], progress=False).save(path)


def save_changed_table(path: Path) -> None:
    table = bitslab.CompressedTable.from_tensor(TENSORS["torch.float32"], progress=False)
    table.update(torch.tensor([3, 50]), torch.zeros(2, 32))
    table.save(path)


def save_checkpoint(path: Path) -> None:
    torch.manual_seed(0)
    model = CachedEmbedding(100, 16, cache_ratio=0.2, device="cpu")
    optimizer = torch.optim.Adagrad(model.parameters())
    model(torch.tensor([5, 3, 99])).sum().backward()
    optimizer.step()
    save_state(model, path, optimizer=optimizer)


def save_weights(path: Path) -> None:
    units = {"a": list(TENSORS)[:2], "b": list(TENSORS)[2:]}
    with WeightPacker(units, disk=path) as packer:
        for name, t in TENSORS.items():
            packer.add(name, t)
        packer.finish().close()


def restored(extension: str) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        known = {"torch.int64": TENSORS["torch.int64"], "torch.uint8": TENSORS["torch.uint8"]}
        with tempfile.TemporaryDirectory() as folder:
            bitslab.save_file(
                {name: bitslab.compress(t) for name, t in known.items()},
                source := os.path.join(folder, "x.bitslab"),
                METADATA,
            )
            out = os.path.join(folder, f"x.{extension}")
            assert cli.main(["decompress", source, out]) == 0
            path.write_bytes(Path(out).read_bytes())

    return save


WAYS = {
    "tensors": save_tensors,
    "clusters": save_clusters,
    "table": save_table,
    "changed-table": save_changed_table,
    "checkpoint": save_checkpoint,
    "packed-weights": save_weights,
    "safetensors": restored("safetensors"),
    "pt": restored("pt"),
    "npz": restored("npz"),
}


def digest(way: str, path: Path) -> str:
    WAYS[way](path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what another process writes, which hashes and fills memory in its own way."""
    code = (
        "import json, sys, torch\n"
        "from pathlib import Path\n"
        "from tests.test_same_bytes import WAYS, digest\n"
        "torch.full((1 << 24,), 0xAB, dtype=torch.uint8)\n"
        "found = {way: digest(way, Path(sys.argv[1], way)) for way in WAYS}\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path_factory.mktemp("elsewhere")],
        cwd=Path(__file__).resolve().parents[1],
        env=os.environ | {"PYTHONHASHSEED": "12345", "MALLOC_PERTURB_": "85", "TZ": "Asia/Tokyo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("way", WAYS)
def test_same_content_has_the_same_bytes(
    way: str, elsewhere: dict[str, str], tmp_path: Path
) -> None:
    first, second = digest(way, tmp_path / "one"), digest(way, tmp_path / "another-name")
    assert first == second == elsewhere[way]


def test_metadata_and_tensors_may_come_in_any_order(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    files.write_tensors(TENSORS, one, ".safetensors", METADATA)
    backwards = dict(reversed(TENSORS.items())), dict(reversed(METADATA.items()))
    files.write_tensors(backwards[0], other, ".safetensors", backwards[1])
    assert one.read_bytes() == other.read_bytes()
