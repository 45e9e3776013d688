"""Reads MovieLens-100k: ratings of films by users, and attributes of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from .clicks import Clicks, ClicksError, Feature, tested_lines

#: Ratings from this one on, of 1 to 5, count as a click.
LIKED = 4
N_GENRES = 19
SECONDS_A_DAY = 86_400


def read_movielens(folder: Path, test_share: float = 0.1) -> Clicks:
    """Read a folder with u.data, and u.item and u.user where they are.

    Dense are the time of the rating, and with u.user the age; sparse are user and film, with
    u.user the gender, occupation and zip code, with u.item the genres, of which a film has
    several. A label is 1 if the rating was 4 or more.

    Parameters
    ----------
    folder : Path
        Where the files are; names may have something before, as in ``ml-100k-u.data``.
    test_share : float
        Share of the lines, the last ones, to keep back; the file is in no order.

    Raises
    ------
    ClicksError
        When a file is missing or is not as it should be; the message names it.
    """
    path = _found(folder, "u.data")
    if path is None:
        raise ClicksError(f"--root {folder}: has no file u.data")
    ratings = _table(path, "\t", 4)
    try:
        users, items, stars, seconds = ratings.astype(np.int64).T
    except ValueError as error:
        raise ClicksError(f"{path}: not four columns of integers: {error}") from error
    n_tested = tested_lines(len(ratings), test_share, str(path))
    user_ids, users = np.unique(users, return_inverse=True)
    item_ids, items = np.unique(items, return_inverse=True)
    days = (seconds - seconds.min()) / SECONDS_A_DAY
    dense = [days / max(days.max(), 1), seconds % SECONDS_A_DAY / SECONDS_A_DAY]
    features = [_feature("user", user_ids, users), _feature("film", item_ids, items)]

    path = _found(folder, "u.user")
    if path is not None:
        known = _rows_of(_table(path, "|", 5), user_ids, path)
        try:
            dense.append(known[:, 1].astype(np.float64)[users] / 100)
        except ValueError as error:
            raise ClicksError(f"{path}: an age is no number: {error}") from error
        for name, column in (("gender", 2), ("occupation", 3), ("zip", 4)):
            values, numbers = np.unique(known[:, column], return_inverse=True)
            features.append(_feature(name, values, numbers[users]))
    path = _found(folder, "u.item")
    if path is not None:
        flags = _rows_of(_table(path, "|", 5 + N_GENRES), item_ids, path)[:, 5:] == "1"
        features.append(_genres(flags[items]))

    rows = np.stack(dense, axis=1).astype(np.float32)
    labels = (stars >= LIKED).astype(np.float32)
    name = "MovieLens-100k"
    return Clicks(name, torch.from_numpy(rows), torch.from_numpy(labels), features, n_tested)


def _feature(name: str, values: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]) -> Feature:
    return Feature(name, len(values), torch.from_numpy(ids.astype(np.int32)))


def _genres(flags: np.ndarray[Any, Any]) -> Feature:
    """Make bags of the genres, bool [N, 19]."""
    begins = np.concatenate([[0], flags.sum(1).cumsum()])
    ids = np.nonzero(flags)[1].astype(np.int32)
    return Feature("genres", N_GENRES, torch.from_numpy(ids), torch.from_numpy(begins))


def _found(folder: Path, name: str) -> Path | None:
    """Find the file of a name, or the one whose name ends with it."""
    if (folder / name).is_file():
        return folder / name
    paths = sorted(path for path in folder.glob(f"*{name}") if path.is_file())
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise ClicksError(f"--root {folder}: has {names}; one of them must be named {name}")
    return paths[0] if paths else None


def _table(path: Path, delimiter: str, columns: int) -> np.ndarray[Any, Any]:
    """Read a small file; titles in u.item are Latin-1."""
    try:
        lines = path.read_text(encoding="latin-1").splitlines()
    except OSError as error:
        raise ClicksError(f"{path}: cannot be read: {error}") from error
    rows = [line.split(delimiter) for line in lines if line]
    for number, row in enumerate(rows, 1):
        if len(row) != columns:
            raise ClicksError(f"{path}: row {number:,} has {len(row)} fields, expected {columns}")
    return np.array(rows).reshape(len(rows), columns)


def _rows_of(
    table: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], path: Path
) -> np.ndarray[Any, Any]:
    """Return the row of each id; the first column says whose a row is."""
    where = {int(number): i for i, number in enumerate(table[:, 0]) if number.isdigit()}
    missing = [int(number) for number in ids if int(number) not in where]
    if missing:
        raise ClicksError(f"{path}: has no row for {missing[0]}, which u.data names")
    return table[[where[int(number)] for number in ids]]
