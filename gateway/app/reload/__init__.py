"""New settings: where they come from, what differs, what is in use."""
