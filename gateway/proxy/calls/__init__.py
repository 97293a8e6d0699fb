"""One call from its request to a server until its client has the response."""
