"""Write a configuration of kvbus as YAML text, for tests."""

from __future__ import annotations


def text_of(sources: str, outputs: str, more: str = "") -> str:
    return f"sources: {sources}\noutputs: {outputs}\n{more}"
