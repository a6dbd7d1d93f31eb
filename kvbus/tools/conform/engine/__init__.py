"""The judge of an engine's publisher.

It reads the frames that the publisher sends, and returns a verdict for each clause of docs/spec.
"""
