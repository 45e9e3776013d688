"""Units that are kept packed on a real GPU, multiplied while they are decoded."""

from __future__ import annotations

import pytest
import torch

from bitslab.offload import offload_report, offload_weights, restore_weights
from tests.offload.test_gpu_offload import ids, llama

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU


def test_tokens_are_fused_prompts_are_decoded_and_logits_are_near():
    plain, packed = llama().cuda(), llama().cuda()
    offload_weights(packed, keep="packed", min_bytes=0, fused=True, progress=False)
    prompt, token = ids(40), ids(1)
    with torch.inference_mode():
        assert torch.equal(packed(prompt).logits, plain(prompt).logits)
        before = offload_report(packed).stats
        for _ in range(3):
            found, expected = packed(token).logits.float(), plain(token).logits.float()
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
        after = offload_report(packed).stats
    assert before["fused"] == 0 and after["fused"] >= 3 * 5 and after["loads"] == before["loads"]
    restore_weights(packed, "cuda")
    with torch.inference_mode():
        assert torch.equal(packed(token).logits, plain(token).logits)


def test_auto_measures_each_shape_once(tmp_path, monkeypatch):
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path))
    monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    packed = llama().cuda()
    offload_weights(packed, keep="packed", min_bytes=0, fused="auto", progress=False)
    with torch.inference_mode():
        packed(ids(1))
        files = sorted(tmp_path.glob("fused-*.json"))
        times = [file.stat().st_mtime_ns for file in files]
        packed(ids(1))
    assert files and times == [file.stat().st_mtime_ns for file in files]
    assert len(files) == len(list(tmp_path.glob("fused-*.json")))
