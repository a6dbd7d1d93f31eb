"""``kvbus index``: a process that finds the workers whose engines hold the blocks of a prompt.

It follows the streams of buses, of engines or of a log. It reads the streams through :mod:`kvbus.client`, as routers
do. It answers questions about prompts over HTTP.
"""
