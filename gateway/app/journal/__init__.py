"""The journal: what happened to the gateway and its endpoints, with who and why."""
