"""Times of products with packed weights: measured once, and kept."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from bitslab.engine.advisor import fastest_way, fused_times, measured_rows

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path))
    monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    monkeypatch.setattr("bitslab.engine.advisor.product_times._without_room", set())
    return tmp_path


def test_rows_are_measured_by_powers_of_two():
    assert [measured_rows(n) for n in (1, 2, 3, 4, 5, 9, 16)] == [1, 2, 4, 4, 8, 16, 16]


def test_times_are_medians_measured_once_and_kept_between_processes(cache, monkeypatch):
    """By a clock that only the work moves, of which the first run compiles and one is held up."""
    prepared, now = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def work(*seconds):
        left = list(seconds)

        def run():
            now[0] += left.pop(0)

        return run

    def prepare(rows):
        prepared.append(rows)
        return work(9, 2, 1, 2, 8, 3), work(9, 40, 20, 30, 10, 90)

    first = fused_times("weight", 3, CPU, prepare)
    assert (first.fused_s, first.decoded_s) == (2, 30)
    assert fused_times("weight", 4, CPU, prepare) == first
    monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    assert fused_times("weight", 4, CPU, prepare) == first and prepared == [4]
    fused_times("weight", 5, CPU, prepare)
    fused_times("another", 4, CPU, prepare)
    assert prepared == [4, 8, 4]


@pytest.mark.parametrize("text", ["{}", "no json", '{"fused_s": -1.0, "decoded_s": 1.0}'])
def test_damaged_files_are_measured_anew(cache, monkeypatch, text):
    prepared = []

    def prepare(rows):
        prepared.append(rows)
        return (lambda: None), (lambda: None)

    fused_times("weight", 1, CPU, prepare)
    (file,) = cache.glob("fused-*.json")
    file.write_text(text)
    monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    fused_times("weight", 1, CPU, prepare)
    assert prepared == [1, 1]


def test_the_fastest_way_is_measured_once_and_kept_between_processes(cache, monkeypatch):
    prepared, now = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def takes(seconds):
        def run():
            now[0] += seconds

        return run

    def prepare(rows):
        prepared.append(rows)
        return {"slow": takes(3), "fast": takes(1), "as fast": takes(1)}

    names = ("slow", "fast", "as fast")
    assert fastest_way(names, "product", 3, CPU, prepare) == "fast"
    monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    assert fastest_way(names, "product", 4, CPU, prepare) == "fast" and prepared == [4]
    fastest_way(names, "product", 5, CPU, prepare)
    assert fastest_way(("slow",), "product", 4, CPU, prepare) == "slow"
    assert prepared == [4, 8, 4]


def test_a_product_that_waits_for_a_graph_does_not_hold_up_other_measurements(cache):
    """One thread measures and wants the lock of a graph, which plans hold that measure."""
    graph_lock, measuring, planned = threading.Lock(), threading.Event(), []

    def wants_the_graph():
        measuring.set()
        assert graph_lock.acquire(timeout=60)
        graph_lock.release()

    def measure(product, work):
        return fastest_way(("usual",), product, 4, CPU, lambda rows: {"usual": work})

    with graph_lock:
        packed = threading.Thread(target=measure, args=("packed", wants_the_graph), daemon=True)
        packed.start()
        assert measuring.wait(60)

        def plan():
            planned.append(measure("plain", lambda: None))

        planning = threading.Thread(target=plan, daemon=True)
        planning.start()
        planning.join(30)
        assert planned == ["usual"]
    packed.join(60)
    assert not packed.is_alive()


def test_one_product_is_measured_by_one_thread(cache):
    prepared, together = [], threading.Barrier(2, timeout=60)

    def prepare(rows):
        prepared.append(rows)
        time.sleep(0.1)
        return {"usual": lambda: None}

    def ask():
        together.wait()
        fastest_way(("usual",), "product", 4, CPU, prepare)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert prepared == [4]


def test_times_are_those_of_torchs_version(cache, monkeypatch):
    prepared = []

    def prepare(rows):
        prepared.append(rows)
        return {"usual": lambda: None}

    for version in (torch.__version__, "2.8.0+another", "2.8.0+another"):
        monkeypatch.setattr(torch, "__version__", version)
        fastest_way(("usual",), "product", 4, CPU, prepare)
    assert len(prepared) == 2


def test_a_way_that_cannot_run_is_left_out_with_a_warning_and_tried_by_the_next_process(
    cache, monkeypatch
):
    def broken():
        raise RuntimeError("too many resources requested for launch")

    prepared = []

    def prepare(rows):
        prepared.append(rows)
        return {"usual": lambda: time.sleep(0.002), "broken": broken, "fast": lambda: None}

    names = ("usual", "broken", "fast")
    with pytest.warns(UserWarning, match="a product goes without 'broken', which cannot run: too"):
        assert fastest_way(names, "product", 4, CPU, prepare) == "fast"
    assert fastest_way(names, "product", 4, CPU, prepare) == "fast" and prepared == [4]
    monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    with pytest.warns(UserWarning, match="without 'broken'"):
        fastest_way(names, "product", 4, CPU, prepare)
    assert prepared == [4, 4]
    with pytest.raises(RuntimeError, match="too many resources"):
        fastest_way(("usual",), "another", 4, CPU, lambda rows: {"usual": broken})


def test_without_memory_to_measure_in_the_first_way_is_taken_and_none_tried_again(cache):
    prepared = []

    def prepare(rows):
        prepared.append(rows)
        raise torch.OutOfMemoryError("CUDA out of memory")

    for _ in range(3):
        assert fastest_way(("usual", "fast"), "product", 4, CPU, prepare) == "usual"
    assert prepared == [4]
