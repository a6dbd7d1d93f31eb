"""Plays an engine with every fault that docs/spec names, and asks a router what it holds behind each."""
