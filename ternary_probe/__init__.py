"""How robust is a transformer to low-bit weights? Sign-flip leverage, ternary quantizers and release gates."""

from __future__ import annotations

__version__ = "0.1.0"
