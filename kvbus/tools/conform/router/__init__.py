"""Judges a router: acts as an engine with every fault in docs/spec, and asks the router for its blocks after each."""
