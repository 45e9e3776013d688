"""What streams wait for: the prefetch ring on a GPU, and decoding across the link."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitslab import InvariantCodec, PrefetchRing
from bitslab.engine.transfer import StreamLane, across, fetchers
from tests.streams import recorded

CPU = torch.device("cpu")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_ring_gathers_when_its_buffer_was_used(depth, monkeypatch):
    monkeypatch.setattr(fetchers, "kernels_on", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
    with recorded(monkeypatch) as record:

        def gather(ids, out=None, device=None):
            record.work("gathers")
            return torch.index_select(torch.ones(9, 2), 0, ids, out=out)

        ring = PrefetchRing(gather, [torch.arange(5)] * 8, depth=depth)
        ring._fetcher = fetchers.StreamFetcher(gather, CPU, None)
        expected = [("stream0", "gathers")] * depth
        for n in range(8):
            ring.get()
            record.work("uses")
            if n and n + depth <= 8:
                expected += [("stream0", f"after current:{n}"), ("stream0", "gathers")]
            expected += [("current", f"after stream0:{n + 1}"), ("current", "keeps 40")]
            expected += [("current", "uses")]
        assert record.take() == expected
        ring._fetcher.close()
        assert record.take() == [("host", "after stream0:8")]
        ring.close()


class Kernels:
    """Kernels that record what they would decode."""

    row_period = 1

    def __init__(self, record: Any) -> None:
        self.record = record

    def decode(self, piece, ids, begin, out, facts, sm_budget):
        self.record.work("decodes")


def test_a_piece_crosses_when_the_one_before_in_its_buffer_is_decoded(monkeypatch):
    codec = InvariantCodec.fit(torch.ones(2048, 64).bfloat16())
    packed = codec.encode(torch.ones(2048, 64).bfloat16())
    storage = codec._storage(packed)
    monkeypatch.setattr(across, "PIECE_BYTES", storage.words.nbytes // 7)
    with recorded(monkeypatch) as record:
        lane = StreamLane(CPU)
        monkeypatch.setattr(across, "_copy_lane", lambda device: lane)
        record.work("earlier")
        out: Any = torch.empty(2048, 128, dtype=torch.uint8)
        kernels: Any = Kernels(record)
        across.decode_across(kernels, storage, packed.facts, None, 0, out, "copy-engine")
        steps = [(who, what if "after" in what else what.split()[0]) for who, what in record.take()]
    n_pieces = steps.count(("current", "decodes"))
    expected = [("current", "earlier"), ("stream0", "after current:1")]
    for n in range(n_pieces):
        if n >= across.RING:  # "earlier" is the first work of that stream
            expected.append(("stream0", f"after current:{n - across.RING + 2}"))
        expected += [("stream0", "copies"), ("current", f"after stream0:{n + 1}")]
        expected.append(("current", "decodes"))
    assert steps == expected and n_pieces > across.RING + 1
