"""The saved state of a bus: the blocks that routers hold, and the sequence numbers that the bus may have used."""
