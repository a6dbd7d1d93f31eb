"""Tests that limit the number of Python functions on the way of a usual batch from an engine to a router."""
