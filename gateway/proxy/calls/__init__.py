"""What a kind of call does, planned once for all calls with the same head; and small ones."""
