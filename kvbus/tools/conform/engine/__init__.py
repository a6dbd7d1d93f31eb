"""Judges an engine's publisher: reads the frames that it sends with their times, and returns verdicts."""
