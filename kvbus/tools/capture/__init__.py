"""Captures: files with the recorded messages of a stream, to read, share and play.

In: a live stream, or a capture. Out: a capture, or a publisher that sends the batches of a capture as the engine did,
with faults on request. The package may use ``transport`` and ``core``.
"""
