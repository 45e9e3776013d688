"""Adapters that put bitslab into other frameworks, one subpackage a framework.

An adapter imports its framework on first use, imports ``bitslab.`` by absolute name and never
another adapter. This package itself imports nothing.
"""

if __name__ != "bitslab.integrations":
    # The folder is importable as `integrations` from the root of a checkout. That would make a
    # second copy of every adapter, whose classes and registered ops clash with the real ones.
    raise ImportError(
        f"this package is bitslab.integrations, but it is being imported as {__name__!r}; "
        "write `import bitslab.integrations` (after `pip install -e .` in a checkout)"
    )
