"""What DLRM learns from: Criteo's files, MovieLens, drawn clicks; batches of them; the AUC."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dlrm import criteo
from dlrm.auc import auc, rank_auc
from dlrm.clicks import Clicks, ClicksError, Feature, ahead
from dlrm.criteo import EMPTY, hashed, numbered, read_criteo
from dlrm.movielens import read_movielens
from dlrm.zipf import ZipfIds, draw_clicks, scaled_rows
from sklearn.metrics import roc_auc_score

N_LINES = 40


def lines_of_criteo(seed: int = 0) -> list[list[str]]:
    """Make lines of a log: fields that are empty, negative, and categories of few values."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(N_LINES):
        dense = ["" if rng.random() < 0.2 else str(rng.integers(-3, 10**6)) for _ in range(13)]
        # Five values each, some with leading zeros.
        values = [f"{rng.integers(5) * 0x1234567 + i:08x}" for i in range(26)]
        sparse = ["" if rng.random() < 0.2 else value for value in values]
        lines.append([str(rng.integers(2)), *dense, *sparse])
    return lines


def written(path: Path, lines: list[list[str]], delimiter: str = "\t", end: str = "\n") -> Path:
    text = "".join(delimiter.join(line) + end for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def check_criteo(clicks: Clicks, lines: list[list[str]]) -> None:
    """Compare what was read with what Python reads."""
    assert clicks.labels.tolist() == [float(line[0]) for line in lines]
    for column in range(13):
        expected = [math.log1p(max(float(line[1 + column] or 0), 0)) for line in lines]
        assert clicks.dense[:, column].tolist() == pytest.approx(expected, rel=1e-6)
    for column, feature in enumerate(clicks.features):
        values = [line[14 + column] for line in lines]
        numbers = {value: i for i, value in enumerate(sorted(set(values)))}
        assert feature.rows == len(numbers)
        assert feature.ids.tolist() == [numbers[value] for value in values]


FORMS: dict[str, dict[str, Any]] = {
    "tsv": {},
    "csv": {"delimiter": ","},
    "csv with numbers": {"delimiter": ",", "numbers": True},
    "csv with numbers and names": {"delimiter": ",", "numbers": True, "names": True},
    "tsv with names": {"names": True},
    "carriage returns": {"end": "\r\n"},
    "no last newline": {"cut": 1},
    "gz": {"suffix": ".gz"},
}


@pytest.mark.drawn(8)
@pytest.mark.parametrize("read_bytes", [300, 1 << 24], ids=["pieces", "whole"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_criteo_is_read_as_python_reads_it(
    form: dict[str, Any], read_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo, "READ_BYTES", read_bytes)
    lines = lines_of_criteo()
    rows = [list(line) for line in lines]
    if form.get("names"):
        rows = [["label", *criteo.DENSE_NAMES, *criteo.NAMES], *rows]
    if form.get("numbers"):
        rows = [
            [str(1000 + i) if i or "names" not in form else "Id", *row]
            for i, row in enumerate(rows)
        ]
    path = tmp_path / f"log.txt{form.get('suffix', '')}"
    written(path, rows, form.get("delimiter", "\t"), form.get("end", "\n"))
    if form.get("cut"):
        path.write_bytes(path.read_bytes()[:-1])
    calls: list[tuple[int, int]] = []
    clicks = read_criteo(path, 1000, report=lambda done, total: calls.append((done, total)))
    check_criteo(clicks, lines)
    assert (len(clicks), clicks.n_tested) == (N_LINES, 4)
    assert calls[-1] == (path.stat().st_size, path.stat().st_size)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("read_bytes", [300, 1 << 24], ids=["pieces", "whole"])
def test_criteo_is_read_up_to_a_line(
    read_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo, "READ_BYTES", read_bytes)
    lines = lines_of_criteo()
    lines[20] = ["what comes later is not looked at"]
    clicks = read_criteo(written(tmp_path / "log.txt", lines), 1000, max_lines=20)
    check_criteo(clicks, lines[:20])


def test_criteo_takes_decimals_and_other_categories(tmp_path: Path) -> None:
    lines = lines_of_criteo()
    lines[3][2], lines[4][2], lines[5][15], lines[6][15] = "7.0", "1e3", "shoes", "0123456789"
    clicks = read_criteo(written(tmp_path / "log.txt", lines), 1000)
    assert clicks.dense[3:5, 1].tolist() == pytest.approx([math.log1p(7), math.log1p(1000)])
    values = {line[15]: int(line[15] or "0", 16) for line in lines if line[15] != "shoes"}
    values |= {"": EMPTY, "shoes": zlib.crc32(b"shoes"), "0123456789": zlib.crc32(b"0123456789")}
    order = {value: i for i, value in enumerate(sorted(values.values()))}
    assert clicks.features[1].ids.tolist() == [order[values[line[15]]] for line in lines]


def test_values_beyond_the_rows_are_hashed() -> None:
    values = np.arange(-1, 999, dtype=np.int64)
    assert numbered(values, 1000)[0] == 1000
    rows, ids = numbered(values, 100)
    assert rows == 100
    assert ids.tolist() == hashed(values, 100).tolist()
    # About ten to a row, and none that takes many: a last-bits hash would do for no step of 100.
    counts = np.bincount(hashed(values * 100, 100), minlength=100)
    assert counts.sum() == 1000
    assert counts.max() < 30
    assert (counts > 0).all()


BAD_FIELDS = {
    "label": (0, "2", "line 3 has label '2', accepted are 0 and 1"),
    "no label": (0, "", "line 3 has label '', accepted"),
    "integer": (5, "many", "line 3 has I5 'many', accepted are numbers and nothing"),
    "minus": (5, "-", "line 3 has I5 '-', accepted are numbers"),
    "infinite": (13, "inf", "line 3 has I13 'inf', accepted are finite numbers"),
    "too many": (1, "1\t1", "line 3 has 41 fields, expected 40"),
}


@pytest.mark.parametrize(("column", "text", "message"), BAD_FIELDS.values(), ids=BAD_FIELDS)
@pytest.mark.parametrize("read_bytes", [300, 1 << 24], ids=["pieces", "whole"])
def test_criteo_names_the_line_that_is_wrong(
    column: int,
    text: str,
    message: str,
    read_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(criteo, "READ_BYTES", read_bytes)
    lines = lines_of_criteo()
    lines[2][column] = text
    with pytest.raises(ClicksError) as raised:
        read_criteo(written(tmp_path / "log.txt", lines), 1000)
    assert message in str(raised.value)
    assert "a label, 13 integers and 26 categories" in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 lines, which are too few"),
        (b"\t".join([b"1"] * 40) + b"\n", "1 lines, which are too few"),
        (b"no log at all\nor\n", "line 1 has 1 fields, expected 40"),
    ],
    ids=["empty", "one line", "prose"],
)
def test_files_that_are_no_logs(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(content)
    with pytest.raises(ClicksError, match=message):
        read_criteo(tmp_path / "log.txt", 1000)


@pytest.mark.parametrize("kept", [slice(100), slice(5, None)], ids=["cut off", "no gzip"])
def test_a_damaged_gz(kept: slice, tmp_path: Path) -> None:
    path = written(tmp_path / "log.gz", lines_of_criteo())
    path.write_bytes(path.read_bytes()[kept])
    with pytest.raises(ClicksError, match="log.gz: cannot be read"):
        read_criteo(path, 1000)


# MovieLens

GENRES = {1: [0, 5], 2: [], 7: [18]}


@pytest.fixture
def movielens(tmp_path: Path) -> Path:
    """Write three files of three users and three films, each with one that has no rating."""
    ratings = [(5, 1, 5, 86_400), (3, 2, 3, 90_000), (5, 7, 4, 864_000), (9, 1, 1, 100_000)]
    (tmp_path / "ml-u.data").write_text(
        "".join("\t".join(map(str, rating)) + "\n" for rating in ratings)
    )
    (tmp_path / "ml-u.user").write_text(
        "3|30|F|artist|123\n4|1|M|x|y\n5|50|M|writer|T8H1N\n9|9|F|artist|123\n"
    )
    films = []
    for film, genres in {**GENRES, 4: [1]}.items():
        flags = ["1" if i in genres else "0" for i in range(19)]
        films.append("|".join([str(film), "Caf\xe9", "1995", "", "http", *flags]))
    (tmp_path / "ml-u.item").write_bytes("\n".join(films).encode("latin-1"))
    return tmp_path


def test_movielens_with_users_and_films(movielens: Path) -> None:
    clicks = read_movielens(movielens, test_share=0.25)
    assert clicks.labels.tolist() == [1, 0, 1, 0]
    assert clicks.table_rows == {
        **{"user": 3, "film": 3, "gender": 2, "occupation": 2, "zip": 2, "genres": 19}
    }
    assert clicks.dense.shape == (4, 3)
    assert clicks.dense[:, 0].tolist() == pytest.approx([0, 3600 / 777_600, 1, 13_600 / 777_600])
    assert clicks.dense[:, 2].tolist() == pytest.approx([0.5, 0.3, 0.5, 0.09])
    batch = clicks.batch(torch.tensor([3, 1, 2]))
    bags = dict(zip(clicks.table_rows, batch.bags, strict=True))
    assert bags["user"][0].tolist() == [2, 0, 1]
    assert bags["film"][0].tolist() == [0, 1, 2]
    assert bags["occupation"][0].tolist() == [0, 0, 1]
    assert [part.tolist() for part in bags["genres"]] == [[0, 5, 18], [0, 2, 2]]
    assert batch.n_lookups == 5 * 3 + 3
    assert clicks.n_tested == 1


def test_movielens_of_ratings_alone(movielens: Path) -> None:
    (movielens / "ml-u.user").unlink()
    (movielens / "ml-u.item").unlink()
    clicks = read_movielens(movielens)
    assert clicks.table_rows == {"user": 3, "film": 3}
    assert clicks.dense.shape == (4, 2)


BAD_FILES = {
    "columns": ("ml-u.data", "1\t2\t3\n", "ml-u.data: row 1 has 3 fields, expected 4"),
    "numbers": ("ml-u.data", "1\t2\tgood\t4\n", "ml-u.data: not four columns of integers"),
    "few": ("ml-u.data", "1\t2\t3\t4\n", "1 lines, which are too few"),
    "user": ("ml-u.user", "3|30|F|artist|123\n", "ml-u.user: has no row for 5, which u.data names"),
    "age": ("ml-u.user", "".join(f"{i}|old|F|a|1\n" for i in (3, 5, 9)), "an age is no number"),
    "film": ("ml-u.item", "1|a|b|c|d\n", "ml-u.item: row 1 has 5 fields, expected 24"),
    "several": ("other-u.data", "", "has ml-u.data, other-u.data; one of them must be named"),
}


@pytest.mark.parametrize(("name", "text", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_movielens_files_that_are_wrong(
    name: str, text: str, message: str, movielens: Path
) -> None:
    (movielens / name).write_text(text)
    with pytest.raises(ClicksError) as raised:
        read_movielens(movielens)
    assert message in str(raised.value)


def test_movielens_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ClicksError, match=r"has no file u\.data"):
        read_movielens(tmp_path)


# Batches


def test_bags_of_any_size_keep_their_ids() -> None:
    rng = np.random.default_rng(0)
    bags = [rng.integers(9, size=rng.integers(4)).tolist() for _ in range(50)]
    begins = torch.tensor([0, *np.cumsum([len(bag) for bag in bags])])
    feature = Feature("f", 9, torch.tensor([i for bag in bags for i in bag]).int(), begins)
    lines = torch.from_numpy(rng.integers(50, size=80))
    ids, offsets = feature.of(lines)
    assert ids.dtype == offsets.dtype == torch.int64
    found = [part.tolist() for part in ids.tensor_split(offsets[1:])]
    assert found == [bags[line] for line in lines]


def test_an_epoch_has_each_line_once() -> None:
    clicks = draw_clicks(100, 1e-4, 1.0, seed=0, test_share=0.2)
    generator = torch.Generator().manual_seed(0)
    lines = clicks.epoch(16, generator)
    assert [len(part) for part in lines] == [16] * 5
    assert len(set(torch.cat(lines).tolist())) == 80
    assert torch.cat(lines).max() < clicks.n_trained == 80
    assert torch.cat(clicks.epoch(16, generator)).tolist() != torch.cat(lines).tolist()
    assert [len(part) for part in clicks.epoch(500, generator)] == [80]
    assert torch.cat(clicks.tested(16)).tolist() == list(range(80, 100))


def test_batches_come_with_the_next_one() -> None:
    items: Any = ["a", "b", "c"]
    pairs: list[Any] = list(ahead(items))
    assert pairs == [("a", "b"), ("b", "c"), ("c", None)]
    assert list(ahead([])) == []


# Drawn clicks


def test_sizes_are_those_of_criteo() -> None:
    assert sum(scaled_rows(1).values()) == 33_762_577
    assert list(scaled_rows(1).values())[:4] == [1460, 583, 10_131_227, 2_202_608]
    scaled = scaled_rows(0.01)
    assert list(scaled.values())[:6] == [1000, 583, 101_312, 22_026, 305, 24]
    assert min(scaled.values()) == 3


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.2])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_ids_follow_the_law(rows: int, exponent: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = ZipfIds(rows, exponent).draw(200_000, generator)
    assert ids.dtype == torch.int64
    counts = torch.bincount(ids, minlength=rows).sort(descending=True).values
    assert len(counts) == rows
    if exponent == 0 and rows > 1:
        assert counts.max() < 2 * counts.min()
    elif rows == 1000:
        # Between k and k + 1 the law is smooth, so the k-th is not exactly k ** -s of the first.
        def mass(k: int) -> float:
            s = 1 - exponent
            return math.log((k + 1) / k) if s == 0 else ((k + 1) ** s - k**s) / s

        for k in (2, 10, 50):
            assert counts[k - 1] / counts[0] == pytest.approx(mass(k) / mass(1), rel=0.15)
    multiplier = ZipfIds(rows, exponent).multiplier
    assert math.gcd(multiplier, rows) == 1


def test_drawn_clicks_are_the_same_for_a_seed() -> None:
    calls: list[int] = []
    one = draw_clicks(500, 1e-4, 1.05, seed=3, report=lambda done, _: calls.append(done))
    two = draw_clicks(500, 1e-4, 1.05, seed=3)
    other = draw_clicks(500, 1e-4, 1.05, seed=4)
    assert calls == list(range(1, 27))
    assert torch.equal(one.dense, two.dense)
    assert torch.equal(one.labels, two.labels)
    assert all(
        torch.equal(a.ids, b.ids) and a.rows == b.rows
        for a, b in zip(one.features, two.features, strict=True)
    )
    assert not torch.equal(one.labels, other.labels)
    assert not torch.equal(one.features[2].ids, other.features[2].ids)
    assert all(int(f.ids.max()) < f.rows for f in one.features)


def test_a_quarter_or_so_is_clicked() -> None:
    clicks = draw_clicks(20_000, 1e-4, 1.05, seed=0)
    assert 0.2 < float(clicks.labels.mean()) < 0.4


# The AUC


@pytest.mark.parametrize("distinct", [2, 10, 100_000], ids=["two", "ten", "many"])
def test_auc_is_that_of_scikit_learn(distinct: int) -> None:
    rng = np.random.default_rng(distinct)
    labels = torch.from_numpy((rng.random(3000) < 0.3).astype(np.float32))
    scores = torch.from_numpy((rng.integers(distinct, size=3000) / distinct).astype(np.float32))
    scores += labels / 3
    expected = roc_auc_score(labels.numpy(), scores.numpy())
    assert 0.5 < expected < 1
    assert rank_auc(labels, scores) == pytest.approx(expected, rel=1e-12)
    assert auc(labels, scores) == expected


def test_auc_counts_pairs() -> None:
    labels, scores = torch.tensor([0.0, 1, 0, 1]), torch.tensor([0.1, 0.1, 0.5, 0.9])
    # Of four pairs two are right, one is equal and one is wrong.
    assert rank_auc(labels, scores) == 2.5 / 4


@pytest.mark.parametrize(
    ("labels", "scores"),
    [([1.0, 1.0], [0.1, 0.2]), ([0.0, 1.0], [0.1, math.nan]), ([0.0, 1.0], [0.1, math.inf])],
    ids=["one kind", "nan", "infinite"],
)
def test_auc_that_is_not_defined(labels: list[float], scores: list[float]) -> None:
    assert math.isnan(auc(torch.tensor(labels), torch.tensor(scores)))


def test_auc_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    assert auc(torch.tensor([0.0, 1]), torch.tensor([0.2, 0.1])) == 0
