"""Whose code is it: finds the user's own line among frames of torch and of this package."""

from __future__ import annotations

import os
import sys
import traceback

import torch

__all__ = ["is_users", "user_frame"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep


def is_users(file: str) -> bool:
    """Returns whether a source file is neither torch's nor one that captures."""
    return not file.startswith((_TORCH, _OWN, "<"))


def user_frame() -> traceback.FrameSummary | None:
    """Returns the innermost frame of the present call that is the user's own, without its source text."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return None
    return traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, lookup_line=False)
