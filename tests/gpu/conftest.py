"""Tests that need a card are not collected where there is none, so that no run has skips."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
