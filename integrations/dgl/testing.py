"""A pytest plug-in: any test run of DGL with its columns compressed, or its layers compiled.

``pytest -p bitslab.integrations.dgl.testing --bitslab-compress-features ...`` makes each column
that DGL makes of a tensor a `CompressedColumn`, so that any test suite of DGL checks that results
do not change. Columns that cannot be compressed are left raw: integers, gradients, tensors on a
GPU. Warnings of decoded copies are ignored: the tests did not choose to compress.

With ``--bitslab-compile-relational`` RelGraphConv, HGTConv and TypedLinear of `dgl.nn` are the
compiled classes for the run. DGL's own tests of these layers pass so. Without these options nothing
happens.
"""

from __future__ import annotations

import contextlib
from typing import Any

import dgl.nn
import pytest
from dgl.frame import Column, Frame
from dgl.nn import pytorch

from bitslab import CompressedFeature
from bitslab.integrations.dgl import relational
from bitslab.integrations.dgl.column import CompressedColumn, put_feature, why_raw

OPTION = "--bitslab-compress-features"
RELATIONAL = "--bitslab-compile-relational"
#: Where DGL's users, and its tests, find the layers. The modules that define them keep their own:
#: a layer that is in a layer, which no test made, is pickled by that name.
_MODULES = (dgl.nn, pytorch, pytorch.conv)
_plain_layers: dict[str, type] = {
    name: getattr(pytorch, name) for name in ("RelGraphConv", "HGTConv", "TypedLinear")
}

# Every column is packed, however small, by a fixed plan: suites make thousands of columns of a few
# numbers.
PLAN: dict[str, Any] = {"code_bits": 1, "grouped": False, "uniform": False}


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may.

    Packed rows are in shared memory, which is an open file, and suites keep hundreds of graphs,
    while many systems allow 1024 files unless a process asks for more.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limit here, or refused
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class CompressEveryColumn:
    """Compress columns as DGL makes them, between `start` and `stop`.

    Attributes
    ----------
    compressed, raw : int
        Columns that were compressed, and that were left raw.
    """

    def __init__(self) -> None:
        self.compressed = 0
        self.raw = 0
        self._plain: list[tuple[type, str, Any]] = []

    def start(self) -> None:
        """Compress every column from now on."""
        plain_init, plain_create, plain_add = Column.__init__, Column.create, Frame.add_column

        def init(column: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
            plain_init(column, storage, *args, **kwargs)
            # With more arguments than a storage it is a copy that DGL has not finished.
            if not args and not kwargs:
                self._compress(column)

        def create(data: Any) -> Any:
            column = plain_create(data)
            if isinstance(data, Column):  # from a tensor, `init` compressed it
                self._compress(column)
            return column

        def add_column(frame: Any, name: str, scheme: Any, ctx: Any) -> None:
            plain_add(frame, name, scheme, ctx)
            self._compress(frame._columns[name])

        self._put(Column, "__init__", init)
        self._put(Column, "create", staticmethod(create))
        self._put(Frame, "add_column", add_column)

    def stop(self) -> None:
        """Restore DGL's methods, which make plain columns."""
        while self._plain:
            owner, name, value = self._plain.pop()
            setattr(owner, name, value)

    def _put(self, owner: type, name: str, value: Any) -> None:
        self._plain.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def _compress(self, column: Any) -> None:
        if isinstance(column, CompressedColumn) or isinstance(column.storage, CompressedFeature):
            return  # or a copy of a compressed column, which becomes one
        if column.index is not None or why_raw(column):
            self.raw += 1
            return
        rows = column.data
        row_bytes = rows[:1].numel() * rows.element_size()
        chunk_bytes = next(n for n in (4, 2, 1) if row_bytes % n == 0)
        feature = CompressedFeature.from_tensor(
            rows, codec="ibp", chunk_bytes=chunk_bytes, progress=False, **PLAN
        )
        put_feature(column, feature)
        self.compressed += 1


_KEY = pytest.StashKey[CompressEveryColumn]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, of which the plug-in for PyG adds like ones too."""
    for option, what in (
        (OPTION, "compress every floating-point feature column that DGL makes in this run"),
        (RELATIONAL, "compile every layer of typed edges"),
    ):
        with contextlib.suppress(ValueError):
            parser.getgroup("bitslab").addoption(
                option, action="store_true", default=False, help=what
            )


def pytest_configure(config: pytest.Config) -> None:
    """Start before test modules are imported: some make graphs at import."""
    if config.getoption(OPTION):
        config.addinivalue_line("filterwarnings", "ignore::bitslab.DecodedCopyWarning")
        allow_many_files()
        config.stash[_KEY] = CompressEveryColumn()
        config.stash[_KEY].start()
    if config.getoption(RELATIONAL):
        for name in _plain_layers:
            _put_layer(name, getattr(relational, name))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore DGL's methods and layers."""
    for name, layer in _plain_layers.items():
        _put_layer(name, layer)
    if _KEY in config.stash:
        config.stash[_KEY].stop()


def pytest_report_header(config: pytest.Config) -> str:
    """Return a line on whether layers are compiled."""
    layers = "compiled" if config.getoption(RELATIONAL) else "as they are"
    return f"bitslab: DGL's layers of typed edges are {layers}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the number of columns."""
    if _KEY in config.stash:
        every = config.stash[_KEY]
        terminalreporter.write_line(
            f"bitslab: {every.compressed} columns were compressed, {every.raw} were left raw"
        )


def _put_layer(name: str, layer: type) -> None:
    for module in _MODULES:
        if hasattr(module, name):
            setattr(module, name, layer)
