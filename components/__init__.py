"""Muster: reinforcement-learning post-training that trains safely on incomplete groups.

The folder `components/` is installed as the package `muster`; importing this package loads nothing heavy.
"""

if __name__ != "muster":
    raise ImportError(f"this package has one name: import muster, not {__name__}")
