"""benchmarks/kvcomp.py --plot: figures 5 to 8 of the paper, of tables that it has printed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

matplotlib.use("Agg")

ROOT = Path(__file__).resolve().parents[3]
TABLES: dict[str, list[dict[str, Any]]] = {
    "SmolLM2: accuracy over the scale of one side, 576 tokens predicted": [
        {
            "curve": curve,
            "scale": scale,
            "bits": 16 / ratio,
            "ratio": ratio,
            "accuracy, of plain": a,
        }
        for curve, points in {
            "K weighted": [(0.5, 4.0, 1.0), (1.0, 5.5, 0.98), (2.0, 8.0, 0.9)],
            "V by rms": [(0.5, 5.0, 0.9)],  # below the criterion from the first scale on
        }.items()
        for scale, ratio, a in points
    ],
    "SmolLM2: ratio over the context, and the error of attention": [
        {"context": 2048, "error 0.055": 6.5, "error 0.055: measured": 0.054, "KIVI, 2 bits": 5.33},
        {"context": 16384, "error 0.055": 7.0, "error 0.055: measured": 0.05, "KIVI, 2 bits": 5.33}
        | {"rotations": "slower"},
    ],
    "Turning points: accuracy is 97% of the plain model's": [],
}


def test_pictures_of_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for scripts in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / scripts))
    main = importlib.import_module("kvcomp").main
    settings = dict(matplotlib.rcParams)
    tables, folder = tmp_path / "tables.json", tmp_path / "new" / "pictures"
    tables.write_text(json.dumps(TABLES))
    assert main(["--tables", str(tables), "--plot", str(folder)]) == 0
    drawn = {file.stem: file.read_text() for file in folder.iterdir()}
    assert drawn.keys() == {"accuracy-over-scale", "accuracy-over-ratio", "ratio-over-context"}
    for name in ("accuracy-over-scale", "accuracy-over-ratio"):
        assert "K weighted" in drawn[name] and "V by rms" in drawn[name]
    assert "error 0.055<" in drawn["ratio-over-context"] and "16,384" in drawn["ratio-over-context"]
    assert "measured" not in drawn["ratio-over-context"]
    assert capsys.readouterr().err.count("drawn: ") == 3
    assert dict(matplotlib.rcParams) == settings  # other pictures of the process look as they did
    tables.write_text("{}")
    assert main(["--tables", str(tables), "--plot", str(folder)]) == 0
    assert "nothing is drawn" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--tables", str(tables)])
    assert "given without --plot" in capsys.readouterr().err
