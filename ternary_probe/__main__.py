"""``python -m ternary_probe``: the same as the ``ternary-probe`` script."""

from __future__ import annotations

from ternary_probe.cli import main

if __name__ == "__main__":
    main()
