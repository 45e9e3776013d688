"""Check an install that has torch and numpy and no other dependency: `make light` runs this.

It is a plain script, because pytest is not installed either. Each check says what it saw; the exit
status is the number of checks that failed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ABSENT = ["cupy", "matplotlib", "numba", "rich", "safetensors", "scipy"]
LOADED = (
    "import sys, numpy, torch\n"
    "before = set(sys.modules)\n"
    "import bitslab\n"
    "new = [m for name, m in sys.modules.items() if name not in before]\n"
    "print(*{m.__name__.split('.')[0] for m in new if getattr(m, '__file__', None)})"
)

failures = 0


@contextlib.contextmanager
def check(what: str) -> Iterator[Callable[[str], None]]:
    """Run one check; print its outcome with its remarks."""
    global failures
    notes: list[str] = []
    try:
        yield notes.append
    except Exception as error:
        failures += 1
        print(f"FAILED  {what}: {type(error).__name__}: {error}")
    else:
        print(f"ok      {what}" + "".join(f" ({note})" for note in notes))


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)


def expect_missing(package: str, call: Callable[[], object], note: Callable[[str], None]) -> None:
    """Expect the error that names the package to install."""
    from bitslab.errors import MissingExtraError

    try:
        call()
    except MissingExtraError as error:
        expect(f"pip install {package}" in str(error), f"does not say what to install: {error}")
        note(str(error))
    else:
        raise AssertionError(f"worked without {package}")


def write_safetensors(path: Path) -> None:
    """Write one float32 tensor of zeros, without the library."""
    entry = {"dtype": "F32", "shape": [64, 64], "data_offsets": [0, 4 * 64 * 64]}
    header = json.dumps({"weight": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * 64 * 64))


def main() -> int:
    with check("only torch and numpy are installed"):
        found = [name for name in ABSENT if importlib.util.find_spec(name)]
        expect(not found, f"also here, so that this shows nothing: {found}")

    with check("import bitslab") as note:
        import bitslab

        installed = Path(bitslab.__file__).parent
        copy = f"this is not the installed copy: {installed}"
        expect(installed.is_relative_to(sys.prefix), copy)
        note(f"version {bitslab.__version__}")

    with check("import loads nothing but torch, numpy and the standard library"):
        command = [sys.executable, "-I", "-c", LOADED]
        loaded = set(subprocess.check_output(command, text=True).split())
        known = {"bitslab", "numpy", "torch", *sys.stdlib_module_names}
        expect("bitslab" in loaded and loaded <= known, f"also {sorted(loaded - known)}")

    import torch

    tensor = torch.zeros(64, 64)

    with check("compress() says that it needs numba") as note:
        expect_missing("numba", lambda: bitslab.compress(tensor), note)

    with check("CompressedTable says that it needs numba") as note:
        expect_missing("numba", lambda: bitslab.CompressedTable.from_tensor(tensor), note)

    with check("unified tensors and the prefetch ring work"):
        u = bitslab.unified(tensor)
        batches = [torch.tensor([5, 3]), torch.tensor([0])]

        def gather(
            ids: torch.Tensor, out: torch.Tensor | None = None, device: object = None
        ) -> torch.Tensor:
            return torch.index_select(u, 0, ids, out=out)

        shapes = [list(rows.shape) for rows in bitslab.PrefetchRing(gather, batches)]
        expect(shapes == [[2, 64], [1, 64]], f"came as {shapes}")

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "weights.safetensors")
        write_safetensors(path)

        with check("load() says that it needs safetensors") as note:
            expect_missing("safetensors", lambda: bitslab.load(path), note)

        with check("bitslab inspect says what it needs, without a traceback") as note:
            command = [str(Path(sys.executable).with_name("bitslab")), "inspect", str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
            printed = done.stdout + done.stderr
            expect(done.returncode != 0, "the command reports success")
            expect("Traceback" not in printed, printed)
            named = [name for name in ("rich", "safetensors", "numba") if name in printed]
            expect("pip install" in printed and bool(named), f"names nothing: {printed!r}")
            note(printed.strip())

    print(f"light install: {failures} failed" if failures else "light install: all passed")
    return failures


if __name__ == "__main__":
    sys.exit(main())
