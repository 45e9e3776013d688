"""Models that accelerate has spread over a GPU, memory and disk: what it offloaded is packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload, dispatch_model

from bitslab.integrations.accelerate import compress_offloaded, restore
from bitslab.offload import WeightHandle
from tests.helpers import same_bits
from tests.integrations.transformers.models import SMALL, compressed
from tests.offload.models import stats, tiny_llama, token_ids

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

GPU = torch.device("cuda", 0)
PLACES: dict[str, int | str] = {
    "model.embed_tokens": 0,
    "model.layers.0": 0,
    "model.layers.1": "cpu",
    "model.layers.2": "disk",
    "model.norm": 0,
    "model.rotary_emb": 0,
    "lm_head": "cpu",
}


def by_cpu_offload(model: Any, folder: Path) -> Any:
    return cpu_offload(model, execution_device=GPU)


def by_disk_offload(model: Any, folder: Path) -> Any:
    return disk_offload(model, str(folder / "weights"), execution_device=GPU)


def by_dispatch(model: Any, folder: Path) -> Any:
    return dispatch_model(model, PLACES, offload_dir=str(folder / "weights"))


def by_from_pretrained(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder / "saved")
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / "saved",
        dtype=torch.bfloat16,
        device_map=PLACES,
        offload_folder=str(folder / "weights"),
    ).eval()


# transformers 5.17, of any model that accelerate has offloaded whole.
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids`:UserWarning")
@pytest.mark.parametrize("keep", [None, "packed"], ids=["streamed", "packed"])
@pytest.mark.parametrize(
    "way",
    [by_cpu_offload, by_disk_offload, by_dispatch, by_from_pretrained],
    ids=lambda way: way.__name__,
)
def test_what_was_offloaded_streams_packed_to_a_gpu(way, keep, tmp_path):
    model = tiny_llama(tied=False, dtype=torch.bfloat16).eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = way(model, tmp_path)
    ids = token_ids(2, 9, 0).cuda()
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    with torch.no_grad():
        expected, tokens = model(ids).logits, model.generate(ids, **options)
        report = compress_offloaded(model, min_bytes=0, keep=keep)
        assert report.packed_bytes < report.raw_bytes
        packed = {n for n, p in model.named_parameters() if isinstance(p, WeightHandle)}
        assert any("layers.2" in name for name in packed)
        if way in (by_dispatch, by_from_pretrained):
            assert not any("layers.0" in name or "embed" in name for name in packed)
            assert model.model.layers[0].mlp.up_proj.weight.device == GPU
        for _ in range(3):
            assert same_bits(model(ids).logits, expected)
        for cache in (None, compressed(model.config, **SMALL)):
            found = model.generate(ids, past_key_values=cache, **options)
            assert torch.equal(found, tokens)
    assert (stats(model)["moved_bytes"] > 0) == (keep is None)
    assert all(same_bits(t.cpu(), state[name]) for name, t in model.state_dict().items())
    restore(model)
    assert not any(isinstance(p, WeightHandle) for p in model.parameters())
