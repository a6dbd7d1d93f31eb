"""What an engine's publisher is judged by: frames in, with their times, and verdicts out."""
