"""The state of a bus on disk: the blocks that routers hold, and the sequence numbers that may have been used."""
