"""Captures: files with the recorded messages of a stream, to read, share and play.

Input: a live stream, or a capture. Output: a capture, or a publisher that sends the batches of a capture as the engine
did, with faults if requested. The package may use ``transport`` and ``core``.
"""
