"""Hashes of a question as they were read."""

from kvbus.admin.query_hashes import readings


def plain(pieces):
    """What pieces of hashes may stand for, each reading as one list."""
    return [[name for piece in reading for name in piece.names] for reading in readings(pieces)]
