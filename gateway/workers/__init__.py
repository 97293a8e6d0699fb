"""Worker processes behind one set of addresses, and the supervisor that starts and feeds them."""
