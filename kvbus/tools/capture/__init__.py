"""Captures: files with recorded streams, to read, share and play.

In: a live stream, or a capture. Out: a capture, or a publisher that sends the capture's batches as the engine did,
with faults on request. It may use ``transport`` and ``core``.
"""
