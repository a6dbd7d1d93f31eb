"""The state of a bus on disk: what routers hold, and which sequence numbers may have been used."""
