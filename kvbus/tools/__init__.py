"""Tools that people run beside a bus: ``demo``, ``doctor``, ``top``, ``sim``, ``conform``, and captures of streams.

Input: endpoints, the HTTP port of a bus, captures. Output: text for a person, or a program that acts as an engine or a
router. :mod:`kvbus.cli` has the commands. A tool may import any lower package, including the daemon. Only the commands
import a tool.
"""
