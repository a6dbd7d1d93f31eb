"""Tools that build and release kvbus. They are not installed with it."""
