"""Builds start in an empty folder; everything else is in pyproject.toml."""

import tempfile

from setuptools import setup
from setuptools.command.build import build

FOLDER = tempfile.TemporaryDirectory(prefix="bitslab-build-")  # removed when Python exits


class Build(build):
    """Build outside of the checkout.

    In build/, setuptools would find the modules of earlier builds, and would ship those too that
    have been deleted since.
    """

    def initialize_options(self) -> None:
        """Set the folder that options of the command line may replace."""
        super().initialize_options()
        self.build_base = FOLDER.name


setup(cmdclass={"build": Build})
