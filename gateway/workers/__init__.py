"""Several processes behind one set of addresses: a parent, and workers with an event loop each."""
